"""``python -m bench.capacity``: see `bench.capacity.report`."""

from bench.capacity.report import main

raise SystemExit(main())
