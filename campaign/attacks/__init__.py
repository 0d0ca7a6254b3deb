"""The attacks, one family per file; `campaign/plan.py` lists them."""
