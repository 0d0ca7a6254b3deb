"""A unit, which is a main model with its drafters: its specification, its stay in memory, and its state there."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from app.core.reason import NO_REASON, Reason
from app.core.request import UNQUANTISED, AcceptanceRule, DraftingPolicy, Quantisation


class DrafterSpecification(msgspec.Struct, frozen=True):
    """One drafter of a unit. A multi-token head inside the main model's checkpoint has that model's id and path."""

    id: str
    path: str
    method: str = "draft_model"


class LiveValues(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a unit that may change while it is in memory: an open engine does not depend on them."""

    policy: DraftingPolicy = "auto"
    num_draft_tokens: int | None = None
    queue_limit: int = 128
    draft_unavailable: str = ""
    """Why a chosen drafter is not used; empty when there is nothing to explain."""
    missing_drafters: tuple[str, ...] = ()
    """Chosen drafters that are not on this computer."""
    context_tokens: int = 0
    longest_token_bytes: int = 0
    """Context length and longest token as the model's files state them, to check a prompt's length; 0: unknown."""


class ModelSpecification(msgspec.Struct, frozen=True, kw_only=True):
    """A main model and its drafters: loaded, leased and unloaded as one unit. Paths are local folders."""

    id: str
    path: str
    size_bytes: int = 0
    """Bytes of the main model's tensors on disk: with other weights in its folder, it is another unit."""
    drafters: tuple[DrafterSpecification, ...] = ()
    """At most one per method, best first."""
    acceptance: AcceptanceRule = "coupled"
    methods: tuple[str, ...] = ()
    """Methods that may run; empty: all that can."""
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    """Shortest and longest n-gram, in tokens, that is looked up in earlier text to draft what followed it."""
    ngram_across_requests: bool = False
    """Whether n-grams are looked up in earlier requests of the same owner too."""
    max_rows: int = 8
    prefill_chunk_tokens: int = 2048
    max_context_tokens: int | None = None
    quantisation: Quantisation = UNQUANTISED
    prefix_cache_bytes: int | None = None
    """Memory for the prefix cache, in bytes; None: a share of the memory that the models leave free."""
    live: LiveValues = LiveValues()

    def same_unit(self, other: "ModelSpecification") -> bool:
        """Return whether an engine opened for this unit can serve `other`: only the live values may differ."""
        return msgspec.structs.replace(self, live=other.live) == other

    @property
    def no_drafter(self) -> Reason:
        """Reason why a chosen drafter was not loaded with the model; `NO_REASON` where none is stated."""
        if self.live.missing_drafters:
            code = "missing_some" if self.drafters else "missing_all"
            return Reason(code, {"names": ", ".join(self.live.missing_drafters)})
        detail = self.live.draft_unavailable
        return Reason("drafters", {"detail": detail}) if detail else NO_REASON


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """Time that a model stays in memory; None inherits a value: of the request, else the model, else the server."""

    pinned: bool | None = None
    """Whether only `UnloadModel` takes it out of memory."""
    idle_seconds: float | None = None
    """Seconds without a request until it is unloaded; 0: after its last answer, negative: never."""

    def over(self, other: "Stay") -> "Stay":
        """Return this stay, with the values of `other` where it has none."""
        return Stay(
            pinned=other.pinned if self.pinned is None else self.pinned,
            idle_seconds=other.idle_seconds if self.idle_seconds is None else self.idle_seconds,
        )

    def seconds_left(self, idle_seconds: float) -> float | None:
        """Return how much longer, in seconds, a model idle for `idle_seconds` stays; None: for ever."""
        limit = self.idle_seconds
        return None if self.pinned or limit is None or limit < 0 else max(0.0, limit - idle_seconds)


UNSPECIFIED_STAY = Stay()
DEFAULT_STAY = Stay(pinned=False, idle_seconds=3600.0)


class PrefixState(NamedTuple):
    """Bytes of the prefix cache on disk, tokens restored by tier (`memory`, `disk`), and why nothing is written now."""

    disk_bytes: int = 0
    restored_tokens: Mapping[str, int] = {}
    write_error: str = ""


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    """State of one model in the pool, as `ps`, `/v1/models` and `/metrics` show it."""

    unit: ModelSpecification
    """Unit that is in memory."""
    state: str
    """State of the model: loading or ready."""
    stay: Stay = DEFAULT_STAY
    """Time that it stays in memory, with every value set."""
    last_used: float = 0.0
    """Time at which a request last began or ended, in monotonic seconds, which all processes of a computer share."""
    weights_bytes: int = 0
    cache_bytes: int = 0
    prefix_cache_bytes: int = 0
    prefixes: PrefixState = PrefixState()
    cache_families: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    unavailable: dict[str, Reason] = {}
    longest_drafts: dict[str, int] = {}
    """Method -> longest draft worth considering, in tokens; every method that could run is present."""
    max_context_tokens: int = 0
    running: int = 0
    waiting: int = 0
    reading: dict[str, int] = {}
    """Choice (`request id#index`) in prefill -> number of its prompt tokens that are in the cache."""
    leases: int = 0

    @property
    def id(self) -> str:
        """Id of the model."""
        return self.unit.id

    @property
    def draft_ids(self) -> tuple[str, ...]:
        """Ids of its drafters."""
        return tuple(drafter.id for drafter in self.unit.drafters)

    def idle_seconds(self, now: float) -> float:
        """Return the seconds without a request up to `now`, in monotonic seconds."""
        return 0.0 if self.leases else max(0.0, now - self.last_used)

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds that it stays in memory without further requests; None: for ever."""
        return self.stay.seconds_left(self.idle_seconds(now))

    @property
    def unavailable_texts(self) -> dict[str, str]:
        """Method -> why it cannot run, as text for programs."""
        return {method: str(reason) for method, reason in self.unavailable.items()}
