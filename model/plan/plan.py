"""One plan: a model on an instance or an accelerator, for a prompt, a number of tokens to generate, and batches."""

from __future__ import annotations

from dataclasses import dataclass

from model.device import INSTANCES, Instance, chip, find_instance
from model.errors import ModelError
from model.layers import unsupported
from model.layers.paged import Slots
from model.layers.uneven import uneven
from model.loading.weights import check_ranks
from model.mesh import check_sequence
from model.plan import roofline
from model.plan.dry import Time
from model.plan.memory import Footprint, MeshShape, footprint, possible_tp, smallest_tp
from model.plan.meshes import Candidate, Meshes, check_mesh, powers_of_two
from model.plan.predict import PassTime, Predictor
from model.plan.roofline import Accelerator, Work
from model.plan.sizes import DTYPE_BYTES, ModelSizes
from model.speech.rules import BEGINNING_TOKENS

DEFAULT_INSTANCE = "trn2.48xlarge"
DEFAULT_TOKENS = 1024
"""Prompt and generated tokens together, where the model's context allows it; an eighth is generated."""

SPEECH_TOKENS = 128
"""Generated of a window of speech: as many as `nkw transcribe` writes at most, if it is not told."""

LARGEST_BATCH = 64
MOST_RANKS = 128
"""The last row of the table of footprints: the cores of a trn2.48xlarge."""

_MOST_BATCH = 2**20
_MOST_TOKENS = 2**30


@dataclass(frozen=True)
class Request:
    """The options of a plan; None leaves the choice to the planner."""

    instance: str | None = None
    accelerator: str | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    sp: bool = False
    batch: int = 1
    prompt: int | None = None
    generate: int | None = None
    dtype: str | None = None
    price: float | None = None


@dataclass(frozen=True)
class Phase:
    """A prompt or a decode step: its work, its roofline, and its prediction where kernels exist."""

    work: Work
    roofline_ns: float
    predicted: PassTime | None

    @property
    def time(self) -> Time:
        """The predicted time, else the roofline."""
        return Time.exact(self.roofline_ns) if self.predicted is None else self.predicted.time


@dataclass(frozen=True)
class Rate:
    """Decoding in batches of one size: the step, and what complete requests come to, prompts included."""

    batch: int
    fits: bool
    step: Phase
    tokens_per_s: float
    request_tokens_per_s: float
    dollars_per_million: Time | None


@dataclass(frozen=True)
class Fit:
    """How an instance holds a model: the fewest ranks (None: not at all), copies, and sequences over all copies.

    `held` is what each of these ranks holds; where the model does not fit, each of the most ranks that can share it.
    `shape` has the stages and groups of ranks besides, which a model has that tensor-parallel ranks alone do not hold.
    """

    instance: Instance
    tp: int | None
    copies: int
    sequences: int
    held: Footprint
    shape: MeshShape

    @property
    def core_bytes(self) -> int:
        """What each core has."""
        return chip(self.instance.target).hbm_bytes_per_core


@dataclass(frozen=True)
class Plan:
    """Everything that a plan says. `peaks` are those of one core or device; `copies` of the model run side by side.

    `meshes` are those that were compared, best first, and `mesh` is the one that was taken; None for an accelerator.
    `first_tokens` are those of as many prompts as a batch has, packed into the launches of one.
    """

    model: ModelSizes
    dtype: str
    prompt: int
    generate: int
    batch: int
    place: str
    target: str | None
    devices: int | None
    peaks: Accelerator
    tp: int
    sp: bool
    mesh: Candidate | None
    meshes: tuple[Candidate, ...]
    copies: int
    price: float | None
    footprints: tuple[Footprint, ...]
    fits: tuple[Fit, ...]
    first_token: Phase
    first_tokens: Phase
    rates: tuple[Rate, ...]

    @property
    def context(self) -> int:
        """Positions in use at the last token."""
        return self.prompt + self.generate

    @property
    def uneven(self) -> tuple[str, ...]:
        """What the cores hold padded or alike, in sentences; other accelerators are taken to share all evenly."""
        return () if self.devices is None else uneven(self.model.config, self.tp)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that one more token adds, as long as no window is full."""
        groups = self.model.page_bytes(1, self.dtype).items()
        return sum(size for group, size in groups if not isinstance(group, Slots))

    @property
    def step(self) -> Phase:
        """A decode step at the batch that was asked for."""
        return next(rate.step for rate in self.rates if rate.batch == self.batch)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that each core or device holds; other accelerators are taken to share them evenly."""
        if self.mesh is None:
            return -(-DTYPE_BYTES[self.dtype] * self.model.total // self.tp)
        return self.mesh.weight_bytes

    @property
    def ranks(self) -> int:
        """The cores or devices of one copy."""
        return self.tp if self.mesh is None else self.mesh.shape.ranks

    @property
    def holds_weights(self) -> bool:
        """Whether the weights fit without a cache; True where the memory is unknown."""
        return self.peaks.memory_bytes is None or self.weight_bytes <= self.peaks.memory_bytes

    @property
    def holds(self) -> bool:
        """Whether the batch that was asked for fits."""
        return next(rate.fits for rate in self.rates if rate.batch == self.batch)


def make_plan(model: ModelSizes, request: Request) -> Plan:
    """Plan a model; ModelError for what the model, the instance or the options do not allow."""
    if request.instance is not None and request.accelerator is not None:
        raise ModelError("a plan is for an instance or for an accelerator, not for both")
    if request.batch > _MOST_BATCH:
        raise ModelError(f"a batch of {request.batch}; a plan takes at most {_MOST_BATCH:,}")
    dtype = request.dtype or model.config.dtype or "bfloat16"
    prompt, generate = _tokens(model, request)
    place = _Place.of(model, request, dtype, prompt + generate)
    if request.sp:
        _check_sequence(model, place)
    predictor = _predictor(model, request, place, dtype, prompt + generate)
    peaks = place.peaks.times(place.tp)
    work = roofline.prefill(model, dtype, 1, prompt)
    first = Phase(work, 1e9 * work.seconds(peaks), predictor.first_token(prompt) if predictor else None)
    work = roofline.prefill(model, dtype, request.batch, prompt)
    packed = predictor.first_tokens(prompt, request.batch) if predictor else None
    first_tokens = Phase(work, 1e9 * work.seconds(peaks), packed)
    rates = []
    for batch in sorted({*powers_of_two(LARGEST_BATCH), request.batch}):
        work = roofline.decode(model, dtype, batch, prompt + generate)
        least_ns = place.step_ns(work, batch)
        step = Phase(work, least_ns, predictor.step(batch) if predictor else None)
        rates.append(_rate(batch, place, first, step, generate, request.price))
    return Plan(
        model=model,
        dtype=dtype,
        prompt=prompt,
        generate=generate,
        batch=request.batch,
        place=place.name,
        target=place.target,
        devices=place.devices,
        peaks=place.peaks,
        tp=place.tp,
        sp=request.sp,
        mesh=place.mesh,
        meshes=place.candidates,
        copies=place.copies,
        price=request.price,
        footprints=tuple(
            footprint(model, dtype, tp, prompt + generate) for tp in possible_tp(model, MOST_RANKS)
        ),
        fits=tuple(_fit(model, dtype, prompt + generate, each) for each in INSTANCES.values()),
        first_token=first,
        first_tokens=first_tokens,
        rates=tuple(rates),
    )


def _predictor(
    model: ModelSizes, request: Request, place: _Place, dtype: str, tokens: int
) -> Predictor | None:
    """What predicts passes by kernels; None where there are only rooflines."""
    if place.target is None or unsupported(model.config):
        return None
    # The instance's own name, so that collectives go over its links.
    shape = place.shape
    return Predictor(model.config, place.name, shape.tp, dtype, tokens, request.sp, shape.pp, shape.ep)


@dataclass(frozen=True)
class _Place:
    """Where the model runs: peaks of one core or device, how many share one copy, and what one copy can hold."""

    name: str
    target: str | None
    devices: int | None
    peaks: Accelerator
    tp: int
    copies: int
    sequences: int | None
    meshes: Meshes | None = None
    mesh: Candidate | None = None
    candidates: tuple[Candidate, ...] = ()

    @property
    def shape(self) -> MeshShape:
        """The ranks of a copy."""
        return MeshShape(self.tp) if self.mesh is None else self.mesh.shape

    def step_ns(self, work: Work, batch: int) -> float:
        """The roofline of a decode step: of all ranks together, else of the stages and groups of the mesh."""
        if self.meshes is None or self.shape.ranks == self.tp:
            return 1e9 * work.seconds(self.peaks.times(self.tp))
        return self.meshes.step(self.shape, batch).step_ns

    @classmethod
    def of(cls, model: ModelSizes, request: Request, dtype: str, tokens: int) -> _Place:
        if request.accelerator is not None:
            return cls._accelerator(model, request, request.accelerator, dtype, tokens)
        name = request.instance or DEFAULT_INSTANCE
        instance = find_instance(name)
        name = instance.name
        record, cores = chip(instance.target), instance.physical_cores
        asked = request.tp, request.pp, request.ep
        if request.tp is not None or request.sp:
            asked = request.tp, request.pp or 1, request.ep or 1
        check_mesh(model, *asked, name, cores)
        meshes = Meshes(model, dtype, instance, tokens, request.batch)
        found = meshes.ranked(*asked)
        mesh = found[0]
        if mesh.step is None and asked == (None, None, None):
            mesh = meshes.candidate(MeshShape(possible_tp(model, cores)[-1]))
        peaks, shape = roofline.core(record, dtype), mesh.shape
        return cls(
            *(name, instance.target, cores, peaks, shape.tp, mesh.copies, mesh.sequences),
            *(meshes, mesh, tuple(found)),
        )

    @classmethod
    def _accelerator(cls, model: ModelSizes, request: Request, text: str, dtype: str, tokens: int) -> _Place:
        if (request.pp or 1) * (request.ep or 1) > 1:
            raise ModelError("--pp and --ep are for the cores of an instance, not for an accelerator")
        peaks = roofline.accelerator(text)
        tp = request.tp or 1
        check_ranks(model.config, tp)
        room = None
        if peaks.memory_bytes is not None:
            free = peaks.memory_bytes * tp - DTYPE_BYTES[dtype] * model.total
            room = max(0, free) // max(1, model.cache_bytes(tokens, dtype))
        return cls(peaks.name, None, None, peaks, tp, 1, room)


def _check_sequence(model: ModelSizes, place: _Place) -> None:
    """ModelError where no launches of several ranks are predicted, of which `--sp` could cut the rows."""
    if place.target is None:
        raise ModelError(f"--sp changes launches of kernels; for {place.name} a plan has rooflines only")
    missing = unsupported(model.config)
    if missing:
        raise ModelError(
            f"--sp changes launches of kernels; this model has rooflines only, as no kernel computes {missing[0]}"
        )
    if model.config.spectrum is not None:
        raise ModelError("--sp cuts rows of prompts; those of an encoder stay whole: leave --sp out")
    check_sequence(True, place.tp)


def _tokens(model: ModelSizes, request: Request) -> tuple[int, int]:
    """Prompt and generated tokens, as asked for or within the model's context."""
    longest = model.config.max_position_embeddings
    room = min(DEFAULT_TOKENS, longest or DEFAULT_TOKENS)
    prompt, generate = request.prompt, request.generate
    if model.config.spectrum is not None:
        prompt = BEGINNING_TOKENS if prompt is None else prompt
        generate = max(1, min(SPEECH_TOKENS, room - prompt)) if generate is None else generate
    if generate is None:
        generate = max(1, room // 8)
    if prompt is None:
        prompt = max(1, room - room // 8) if request.generate is None else max(1, room - generate)
    if prompt + generate > _MOST_TOKENS:
        raise ModelError(f"{prompt + generate} tokens; a plan takes at most {_MOST_TOKENS:,}")
    if longest is not None and prompt + generate > longest:
        raise ModelError(
            f"a prompt of {prompt} and {generate} generated tokens exceed the model's context, {longest}"
        )
    return prompt, generate


def _rate(batch: int, place: _Place, first: Phase, step: Phase, generate: int, price: float | None) -> Rate:
    """Prompts go one after another, then the batch decodes together; the first tokens come with the prompts."""
    requests = first.time * batch + step.time * (generate - 1)
    tokens = batch * generate * place.copies
    per_million = None
    if price is not None:
        # dollars an hour over tokens an hour, for a million
        per_million = requests * (price / 3600e9 / tokens * 1e6)
    return Rate(
        batch=batch,
        fits=place.sequences is None or batch <= place.sequences,
        step=step,
        tokens_per_s=1e9 * batch / step.time.program_ns,
        request_tokens_per_s=1e9 * tokens / requests.program_ns,
        dollars_per_million=per_million,
    )


def _fit(model: ModelSizes, dtype: str, tokens: int, instance: Instance) -> Fit:
    """On tensor-parallel ranks alone where these hold the model, else on the mesh of fewest ranks."""
    capacity, cores = chip(instance.target).hbm_bytes_per_core, instance.physical_cores
    tp = smallest_tp(model, dtype, tokens, 1, cores, capacity)
    if tp is None:
        fitting = [each for each in Meshes(model, dtype, instance, tokens, 1).ranked() if each.step]
        if fitting:
            mesh = min(fitting, key=lambda each: each.shape.ranks)
            held = Footprint(mesh.shape.tp, tokens, mesh.weight_bytes, mesh.cache_bytes_per_sequence)
            return Fit(instance, mesh.shape.tp, mesh.copies, mesh.copies * mesh.sequences, held, mesh.shape)
    held = footprint(model, dtype, tp or possible_tp(model, cores)[-1], tokens)
    if tp is None:
        return Fit(instance, None, 0, 0, held, MeshShape(held.tp))
    copies = cores // tp
    return Fit(instance, tp, copies, copies * held.sequences(capacity), held, MeshShape(tp))
