"""Natural-gradient optimizers: Kronecker-factored (SP-NGD, K-FAC), inverse-free, thermodynamic."""
