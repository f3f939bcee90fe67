"""`python -m phalanx.cli`: the `phalanx` command where its script is not on the PATH."""

from phalanx.cli.entry import main

if __name__ == "__main__":
    main()
