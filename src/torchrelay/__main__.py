"""`python -m torchrelay` is the command `torchrelay`."""

from torchrelay.cli import main

if __name__ == "__main__":
    main()
