"""A module that the fork server never finishes importing."""

import threading

threading.Event().wait()
