"""Records of a run: schema, Parquet journal, live line, HTML report."""
