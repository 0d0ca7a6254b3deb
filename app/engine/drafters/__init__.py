"""The drafters: their interface (`drafter`), one file per method, and the drafters of a loaded unit (`registry`)."""
