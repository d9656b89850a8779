"""`python -m adaptive_platform`, the same as the `adaptive-platform` command."""

from adaptive_platform.cli import main

if __name__ == "__main__":
    main()
