"""Whether a URL answers: the health check of an image that has neither curl nor wget. Ends with 1 if it does not."""

import sys
import urllib.error
import urllib.request

try:
    with urllib.request.urlopen(sys.argv[1], timeout=8) as answer:
        sys.exit(0 if answer.status == 200 else 1)
except (OSError, urllib.error.URLError):
    sys.exit(1)
