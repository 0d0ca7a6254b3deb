"""How the store came to its tables, one file for each step; `app.store.migrating` runs them."""
