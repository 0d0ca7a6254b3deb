"""The dashboard: pages, and the files that they load. Never imports `app.api`."""
