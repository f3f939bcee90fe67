"""The monitor's page: files for a browser, and the door through which they ask the service."""
