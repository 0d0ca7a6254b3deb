"""The drafters: what each one is and does (`drafter`), one file for each, and which a loaded unit gets (`registry`)."""
