"""What the pages about models work with: made once for each application."""

from dataclasses import dataclass

from app.admin.attaching import Attaching
from app.admin.loading import Loading
from app.admin.measured_unit import UnitChooser
from app.admin.measuring import Measuring
from app.admin.room import Footprints
from app.serving.context import Context
from app.store.rows import KeptMeasurements
from app.store.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTools:
    """Loads, counts memory, finds drafters, measures and keeps what was measured."""

    loading: Loading
    footprints: Footprints
    units: UnitChooser
    kept: KeptMeasurements
    measuring: Measuring
    attaching: Attaching

    @classmethod
    def of(cls, context: Context, store: Store) -> "ModelTools":
        """Over one server's worker and store."""
        footprints, kept = Footprints(context), KeptMeasurements(store)
        units = UnitChooser(context.resolver, footprints)
        loading = Loading(context.worker, context.resolver, context.activity)
        measuring = Measuring(
            worker=context.worker,
            resolver=context.resolver,
            activity=context.activity,
            units=units,
            kept=kept,
            clock=context.clock,
        )
        return cls(
            loading=loading,
            footprints=footprints,
            units=units,
            kept=kept,
            measuring=measuring,
            attaching=Attaching(context.live, context.resolver, units, loading, measuring),
        )

    async def close(self) -> None:
        """The server ends."""
        await self.attaching.close()
        await self.measuring.close()
