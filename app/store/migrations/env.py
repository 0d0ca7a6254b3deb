"""Entry point of alembic: runs the migrations on the given connection, in the transaction that is open there."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
