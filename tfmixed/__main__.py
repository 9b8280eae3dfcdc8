"""`python -m tfmixed` is the same as `tfmixed`."""

from tfmixed.cli import main

raise SystemExit(main())
