"""``python -m cloudckpt``: the command line (``docs/command-line.md``)."""

from cloudckpt.cli import main

if __name__ == "__main__":
    main()
