"""`python healthy.py PORT`: exit code 0 when the process of this container answers on /healthz."""

from __future__ import annotations

import sys
import urllib.request

with urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/healthz", timeout=2) as answer:
    sys.exit(answer.status != 200)
