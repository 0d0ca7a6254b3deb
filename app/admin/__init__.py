"""What a person sees in the browser: pages, and the files that they load. Never imports `app.api`."""
