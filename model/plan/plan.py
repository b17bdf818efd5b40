"""One plan: a model on an instance or an accelerator, for a prompt, a number of generated tokens, and batch sizes.

`nkw plan` calls `make_plan`; `text` and `document` print the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model.device import INSTANCES, Instance, chip, choose_lnc, find_instance, limit_lnc
from model.errors import ModelError
from model.layers import find_unsupported
from model.layers.paged import NEWEST, Slots
from model.layers.uneven import describe_uneven
from model.loading.weights import check_ranks
from model.mesh import check_sequence
from model.plan.dry import Time
from model.plan.memory import (
    Footprint,
    MeshShape,
    compute_footprint,
    find_smallest_tp,
    list_possible_tp,
    list_powers_of_two,
)
from model.plan.meshes import Candidate, Meshes, check_mesh
from model.plan.policy import Choice, Judged, Question
from model.plan.predict import PassTime, Predictor
from model.plan.prices import Price, find_price
from model.plan.roofline import (
    Accelerator,
    Work,
    compute_core_peaks,
    count_decode_work,
    count_prefill_work,
    parse_accelerator,
)
from model.plan.service_level import DEFAULT_LEVEL, ServiceLevel
from model.plan.sizes import DTYPE_BYTES, ModelSizes
from model.plan.stack_records import STACKS, THIS
from model.plan.stacks import Served, Stack
from model.speech.rules import BEGINNING_TOKENS

DEFAULT_INSTANCE = "trn2.48xlarge"
DEFAULT_TOKENS = 1024
"""Prompt and generated tokens together, where the model's context allows it; an eighth is generated."""

LEVEL = ServiceLevel.parse(DEFAULT_LEVEL)

SPEECH_TOKENS = 128
"""Generated tokens of a window of speech: the default limit of `nkw transcribe`."""

LARGEST_BATCH = 64
MAX_RANKS = 128
"""The last row of the table of footprints: the cores of a trn2.48xlarge."""

_MAX_BATCH = 2**20
_MAX_TOKENS = 2**30


@dataclass(frozen=True)
class Request:
    """Options of a plan; None leaves the choice to the planner.

    | field | meaning |
    |---|---|
    | `instance`, `accelerator` | where the model runs; at most one of both |
    | `tp`, `pp`, `ep` | sizes of the mesh |
    | `sp` | whether ranks divide the rows of prompts (sequence parallelism) |
    | `batch` | sequences that a copy decodes together |
    | `prompt`, `generate` | tokens of the prompt, and tokens to generate |
    | `price` | price of the instance in dollars an hour |
    | `prices` | file that replaces the shipped prices |
    | `level` | service level that the mesh should keep |
    | `stack` | name of the serving stack |
    | `lnc` | physical cores of a rank; None: NEURON_LOGICAL_NC_CONFIG, else the most that the chip has |
    """

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
    prices: Path | None = None
    level: ServiceLevel = LEVEL
    stack: str = THIS.name
    lnc: int | None = None


@dataclass(frozen=True)
class Phase:
    """Prompt pass or decode step of a plan: its work, and its time as a roofline, by dry runs and for a user.

    | field | meaning |
    |---|---|
    | `work` | operations and bytes |
    | `roofline` | the roofline, and the times at the usual and the least shares of the peaks |
    | `predicted` | time by dry runs; None without kernels for the model, or if the batch does not fit |
    | `served` | what a user of the serving stack waits for |
    """

    work: Work
    roofline: Time
    predicted: PassTime | None
    served: Served

    @property
    def roofline_ns(self) -> float:
        """Roofline in ns, a lower bound."""
        return self.roofline.dataflow_ns

    @property
    def time(self) -> Time:
        """Time on the device: by dry runs, or else from the roofline."""
        return self.roofline if self.predicted is None else self.predicted.time


@dataclass(frozen=True)
class Dollars:
    """Dollars per million tokens, stored as the three readings of a `Time`.

    `input` is for prompt tokens and `output` for tokens of decode steps. `request` is for generated tokens when they
    also pay for the prompts of their requests.
    """

    input: Time
    output: Time
    request: Time


@dataclass(frozen=True)
class Rate:
    """Step time, throughput and price of decoding with one batch size.

    `tokens_per_s` counts the decode steps of one copy. `request_tokens_per_s` counts generated tokens of all copies,
    with the time of their prompts. Both are None if the batch does not fit. `dollars` is also None if no price is
    known.
    """

    batch: int
    step: Phase
    tokens_per_s: float | None = None
    request_tokens_per_s: float | None = None
    dollars: Dollars | None = None

    @property
    def fits(self) -> bool:
        """Whether a copy's memory holds the weights and the batch."""
        return self.tokens_per_s is not None


@dataclass(frozen=True)
class Fit:
    """How an instance holds the model: on the fewest ranks that hold one sequence.

    | field | meaning |
    |---|---|
    | `tp` | tensor-parallel ranks of a copy; None if the model does not fit |
    | `copies` | copies on the instance |
    | `sequences` | sequences that all copies together hold |
    | `footprint` | bytes on each rank; of a model that does not fit, with the most ranks that can share it |
    | `shape` | mesh of a copy; has pipeline stages or groups if no number of tensor-parallel ranks is enough |
    | `lnc` | physical cores of a rank |
    """

    instance: Instance
    tp: int | None
    copies: int
    sequences: int
    footprint: Footprint
    shape: MeshShape
    lnc: int = 1

    @property
    def cores(self) -> int:
        """Cores of the instance that can be ranks: its physical cores divided by `lnc`."""
        return self.instance.physical_cores // self.lnc

    @property
    def core_bytes(self) -> int:
        """Bytes of HBM of each rank."""
        return self.lnc * chip(self.instance.target).hbm_bytes_per_core


@dataclass(frozen=True)
class Placement:
    """Instance or accelerator on which the model runs, and the mesh of its copies.

    `peaks` are those of one rank, or of one accelerator. `choice` compares the meshes of the instance. For an
    accelerator, `instance` and `choice` are None, and its devices are assumed to share weights and cache evenly. A rank
    has `lnc` physical cores.
    """

    instance: Instance | None
    peaks: Accelerator
    mesh: Candidate
    choice: Choice | None = None
    lnc: int = 1

    @property
    def name(self) -> str:
        """Name of the instance or the accelerator."""
        return self.peaks.name if self.instance is None else self.instance.name

    @property
    def shape(self) -> MeshShape:
        """Sizes of the mesh of one copy."""
        return self.mesh.shape

    @property
    def meshes(self) -> tuple[Candidate, ...]:
        """All compared meshes, the chosen one first; empty for an accelerator."""
        return () if self.choice is None else self.choice.meshes

    @property
    def judged(self) -> tuple[Judged, ...]:
        """Meshes that hold the batch, the chosen one first; empty for an accelerator."""
        return () if self.choice is None else self.choice.judged

    @property
    def holds_weights(self) -> bool:
        """Whether each rank's memory holds its weights; True if the memory is unknown."""
        return self.peaks.memory_bytes is None or self.mesh.weight_bytes <= self.peaks.memory_bytes

    def can_hold(self, batch: int) -> bool:
        """Return whether a copy's memory holds the weights and a batch; True if the memory is unknown."""
        return self.peaks.memory_bytes is None or (self.holds_weights and batch <= self.mesh.sequences)

    def estimate_step(self, work: Work, batch: int) -> Time:
        """Return the time of a decode step from its roofline, in three readings.

        With pipeline stages or expert-parallel groups, the readings are scaled to the estimate of the mesh, which
        includes collectives and waiting.
        """
        estimate = work.estimate(self.peaks.scale(self.shape.tp))
        if self.choice is None or self.shape.ranks == self.shape.tp:
            return estimate
        step_ns = self.choice.estimator.estimate_step(self.shape, batch).step_ns
        return estimate * (step_ns / estimate.dataflow_ns)


@dataclass(frozen=True)
class Plan:
    """Results of a plan.

    | field | meaning |
    |---|---|
    | `dtype`, `prompt`, `generate` | as requested, or the planner's choice |
    | `footprints` | bytes of a rank for each number of tensor-parallel ranks |
    | `fits` | how each known instance holds the model |
    | `first_token` | pass of one prompt |
    | `first_tokens` | pass that computes as many prompts as the batch has, packed into the same launches |
    | `rates` | decoding by batch size, in ascending order |
    | `price` | price of the instance; None if unknown |

    Phases of a batch that does not fit have no times by dry runs.
    """

    model: ModelSizes
    request: Request
    dtype: str
    prompt: int
    generate: int
    placement: Placement
    footprints: tuple[Footprint, ...]
    fits: tuple[Fit, ...]
    first_token: Phase
    first_tokens: Phase
    rates: tuple[Rate, ...]
    price: Price | None

    @property
    def stack(self) -> Stack:
        """Record of the serving stack of the plan."""
        return STACKS[self.request.stack]

    @property
    def context(self) -> int:
        """Tokens of a finished sequence: prompt and generated ones."""
        return self.prompt + self.generate

    @property
    def uneven(self) -> tuple[str, ...]:
        """Sentences on what ranks hold padded or repeated; empty for an accelerator."""
        config, placement = self.model.config, self.placement
        return () if placement.instance is None else describe_uneven(config, placement.shape.tp)

    @property
    def cache_bytes_per_token(self) -> int:
        """Cache bytes that one more token of a sequence takes, summed over ranks, while no attention window is full.

        Of full pages in four bits it is a token's share of a page.
        """
        groups = self.model.count_page_bytes(1, self.dtype).items()
        return sum(size for group, size in groups if not isinstance(group, Slots) and group != NEWEST)

    @property
    def rate(self) -> Rate:
        """Element of `rates` for the requested batch."""
        return next(rate for rate in self.rates if rate.batch == self.request.batch)


def make_plan(model: ModelSizes, request: Request) -> Plan:
    """Return the plan of a model for the options of a request.

    Raises:
        ModelError: options exclude one another, or the model, instance or accelerator does not allow them.
    """
    if request.instance is not None and request.accelerator is not None:
        raise ModelError(
            "a plan is for an instance or for an accelerator, not for both: leave one of the two out"
        )
    check_batch(request.batch)
    if request.accelerator is None:
        model = model.on_chip(find_instance(request.instance or DEFAULT_INSTANCE).target)
    dtype = request.dtype or model.config.dtype or "bfloat16"
    prompt, generate = choose_tokens(model, request)
    context = prompt + generate
    if request.accelerator is None:
        placement = _place_on_instance(model, request, dtype, prompt, generate)
    else:
        placement = _place_on_accelerator(model, request, dtype, context)
    if request.sp:
        _check_sequence(model, placement)
    stack = _find_stack(request)
    cache_length = stack.pad_cache(context, context)
    if placement.choice is not None and cache_length == context:
        predictor = placement.choice.find_predictor(placement.shape)
    else:
        predictor = create_predictor(model, request, placement, dtype, cache_length)
    peaks = placement.peaks.scale(placement.shape.tp)
    price = _find_price(request, placement)

    def plan_prompts(batch: int) -> Phase:
        work = count_prefill_work(model, dtype, batch, prompt)
        fits, padded = placement.can_hold(batch), stack.pad_prompt(prompt, context)
        predicted = predictor.predict_prompts(padded, batch) if predictor and fits else None
        roofline = work.estimate(peaks)
        return Phase(work, roofline, predicted, _serve_prompts(placement, stack, roofline, predicted, batch))

    first_token = plan_prompts(1)
    rates = []
    for batch in sorted({*list_powers_of_two(LARGEST_BATCH), request.batch}):
        work, fits = count_decode_work(model, dtype, batch, context), placement.can_hold(batch)
        predicted = predictor.predict_step(batch) if predictor and fits else None
        roofline = placement.estimate_step(work, batch)
        served = _serve_step(placement, stack, predicted.time if predicted else roofline, batch)
        step = Phase(work, roofline, predicted, served)
        if fits:
            rates.append(_compute_rate(batch, placement, first_token, step, (prompt, generate), price))
        else:
            rates.append(Rate(batch, step))
    return Plan(
        model=model,
        request=request,
        dtype=dtype,
        prompt=prompt,
        generate=generate,
        placement=placement,
        footprints=tuple(
            compute_footprint(model, dtype, tp, context) for tp in list_possible_tp(model, MAX_RANKS)
        ),
        fits=tuple(
            _fit(model, dtype, context, instance, limit_lnc(instance.target, request.lnc, largest=True))
            for instance in INSTANCES.values()
        ),
        first_token=first_token,
        first_tokens=first_token if request.batch == 1 else plan_prompts(request.batch),
        rates=tuple(rates),
        price=price,
    )


def _find_price(request: Request, placement: Placement) -> Price | None:
    """Return the requested price, or else the price of the instance in the file of prices; None if unknown.

    Raises:
        ModelError: the file of prices cannot be read.
    """
    if placement.instance is not None:
        return find_price(placement.instance, request.price, request.prices)
    return None if request.price is None else Price(request.price)


def _find_stack(request: Request) -> Stack:
    """Return the record of the requested serving stack.

    Raises:
        ModelError: the request is for an accelerator, and the stack is not that of this project.
    """
    stack = STACKS[request.stack]
    if request.accelerator is not None and stack is not THIS:
        raise ModelError(
            f"--stack {stack.name} serves on the cores of an instance, not on an accelerator: leave one of the two out"
        )
    return stack


def _serve_prompts(
    placement: Placement, stack: Stack, roofline: Time, predicted: PassTime | None, prompts: int
) -> Served:
    """Return the time that a user waits for a pass of `prompts` prompts.

    An accelerator has no engine time; its device time is the roofline estimate.
    """
    if placement.instance is None:
        return Served(roofline, 0.0)
    if predicted is None:
        return stack.serve_roofline(roofline, prompts)
    return stack.serve_prompts(predicted, prompts)


def _serve_step(placement: Placement, stack: Stack, time: Time, slots: int) -> Served:
    """Return the time that a user waits for a decode step of `slots` sequences; an accelerator has no engine time."""
    return Served(time, 0.0) if placement.instance is None else stack.serve_step(time, slots)


def create_predictor(
    model: ModelSizes, request: Request, placement: Placement, dtype: str, context: int
) -> Predictor | None:
    """Return the predictor by dry runs for the placement's mesh.

    Returns None for an accelerator, or if no kernel computes the model.
    """
    if placement.instance is None or find_unsupported(model.config):
        return None
    # The name of the instance, so that collectives go over its links.
    shape = placement.shape
    return Predictor(
        *(
            model.config,
            placement.name,
            shape.tp,
            dtype,
            context,
            request.sp,
            shape.pp,
            shape.ep,
            placement.lnc,
        ),
        cache_dtype=model.cache_dtype,
    )


def _place_on_instance(
    model: ModelSizes, request: Request, dtype: str, prompt: int, generate: int
) -> Placement:
    """Return the placement on the mesh that the policy chooses.

    If no mesh holds the batch and no size was requested, returns the mesh with the most tensor-parallel ranks.

    Raises:
        ModelError: the instance is unknown, or the model or the instance cannot have the requested mesh.
    """
    instance = find_instance(request.instance or DEFAULT_INSTANCE)
    sizes = request.tp, request.pp, request.ep
    if request.tp is not None or request.sp:
        sizes = request.tp, request.pp or 1, request.ep or 1
    lnc = choose_lnc(instance.target, request.lnc, largest=True)
    check_mesh(model, *sizes, instance, lnc)
    tp, pp, ep = sizes
    choice = Choice(
        Question(
            *(model, instance, dtype, prompt, generate, request.batch, request.level),
            tp=tp,
            pp=pp,
            ep=ep,
            sp=request.sp,
            lnc=lnc,
        )
    )
    mesh = choice.meshes[0]
    if mesh.step is None and sizes == (None, None, None):
        most = MeshShape(list_possible_tp(model, instance.physical_cores // lnc)[-1])
        mesh = choice.estimator.create_candidate(most)
    peaks = compute_core_peaks(chip(instance.target), dtype, lnc)
    return Placement(instance, peaks, mesh, choice, lnc)


def _place_on_accelerator(model: ModelSizes, request: Request, dtype: str, context: int) -> Placement:
    """Return the placement on as many devices as the request has `tp` (1 by default).

    Raises:
        ModelError: the accelerator is unknown, the model cannot be divided by `tp`, or `pp` or `ep` is not 1.
    """
    if (request.pp or 1) * (request.ep or 1) > 1:
        raise ModelError(
            "--pp and --ep are for the cores of an instance, not for an accelerator: leave both out"
        )
    peaks, tp = parse_accelerator(request.accelerator or "", dtype), request.tp or 1
    check_ranks(model.config, tp)
    weight_bytes, cache_bytes = DTYPE_BYTES[dtype] * model.total, model.count_cache_bytes(context, dtype)
    sequences = max(0, (peaks.memory_bytes or 0) * tp - weight_bytes) // max(1, cache_bytes)
    mesh = Candidate(
        MeshShape(tp), 1, -(-weight_bytes // tp), -(-cache_bytes // tp), sequences, request.batch, None
    )
    return Placement(None, peaks, mesh)


def _check_sequence(model: ModelSizes, placement: Placement) -> None:
    """Check that sequence parallelism changes the plan's predicted launches.

    Raises:
        ModelError: the plan has only rooflines, the model has a speech encoder, or there is only one rank.
    """
    if placement.instance is None:
        raise ModelError(
            f"--sp changes launches of kernels; for {placement.name} a plan has rooflines only: leave --sp out"
        )
    missing = find_unsupported(model.config)
    if missing:
        raise ModelError(
            f"--sp changes launches of kernels; this model has rooflines only, as no kernel computes {missing[0]}: "
            "leave --sp out"
        )
    if model.config.spectrum is not None:
        raise ModelError(
            "--sp divides the rows of prompts among ranks, and a speech encoder needs all rows on every rank: leave "
            "--sp out"
        )
    check_sequence(True, placement.shape.tp)


def check_batch(batch: int) -> None:
    """Raise ModelError for a batch above 2**20, the largest that a plan takes."""
    if batch > _MAX_BATCH:
        raise ModelError(f"a batch of {batch}; a plan takes at most {_MAX_BATCH:,}: give a smaller --batch")


def choose_tokens(model: ModelSizes, request: Request) -> tuple[int, int]:
    """Return (prompt, generate): the requested numbers of tokens, or defaults within the model's context.

    By default, a text model generates an eighth of `DEFAULT_TOKENS`; the prompt takes the remaining tokens.

    Raises:
        ModelError: prompt and generated tokens together exceed the model's context or the largest plan.
    """
    longest = model.config.max_position_embeddings
    room = min(DEFAULT_TOKENS, longest or DEFAULT_TOKENS)
    prompt, generate = request.prompt, request.generate
    if model.config.spectrum is not None:
        prompt = BEGINNING_TOKENS if prompt is None else prompt
        generate = max(1, min(SPEECH_TOKENS, room - prompt)) if generate is None else generate
    if generate is None:
        generate = max(1, room // 8)
    if prompt is None:
        prompt = max(1, room - generate)
    if prompt + generate > _MAX_TOKENS:
        raise ModelError(
            f"{prompt + generate} tokens of prompt and output; a plan takes at most {_MAX_TOKENS:,}: give a smaller "
            "--prompt or --generate"
        )
    if longest is not None and prompt + generate > longest:
        raise ModelError(
            f"a prompt of {prompt} and {generate} generated tokens exceed the model's context, {longest}: give a "
            "smaller --prompt or --generate"
        )
    return prompt, generate


def _compute_rate(
    batch: int,
    placement: Placement,
    first_token: Phase,
    step: Phase,
    tokens: tuple[int, int],
    price: Price | None,
) -> Rate:
    """Return step time, throughput and price of a batch that fits.

    A request's cost assumes that a copy computes the batch's prompts one after another, then decodes them together.

    Args:
        batch: sequences that a copy decodes together.
        placement: gives the number of copies.
        first_token: pass of one prompt.
        step: decode step of the batch.
        tokens: tokens of a prompt, and tokens to generate.
        price: price of the instance; None if unknown.
    """
    prompt, generate = tokens
    copies = placement.mesh.copies
    prompt_time, step_time = first_token.served.time, step.served.time
    requests = prompt_time * batch + step_time * (generate - 1)
    dollars = None
    if price is not None:
        # Dollars of a million ns of the instance, for each token that all copies compute in them.
        rate = price.dollars_per_hour / 3600e9 * 1e6 / copies
        dollars = Dollars(
            input=prompt_time * (rate / prompt),
            output=step_time * (rate / batch),
            request=requests * (rate / (batch * generate)),
        )
    return Rate(
        batch=batch,
        step=step,
        tokens_per_s=1e9 * batch / step_time.program_ns,
        request_tokens_per_s=1e9 * batch * generate * copies / requests.program_ns,
        dollars=dollars,
    )


def _fit(model: ModelSizes, dtype: str, context: int, instance: Instance, lnc: int) -> Fit:
    """Return how an instance holds the model and one sequence: on the fewest tensor-parallel ranks, if any number does.

    Otherwise tries meshes with pipeline stages and expert-parallel groups, and takes the one with the fewest ranks.
    `tp` of the result is None if none fits.
    """
    capacity, cores = lnc * chip(instance.target).hbm_bytes_per_core, instance.physical_cores // lnc
    model = model.on_chip(instance.target)
    tp = find_smallest_tp(model, dtype, context, 1, cores, capacity)
    if tp is None:
        fitting = [mesh for mesh in Meshes(model, dtype, instance, context, 1, lnc).rank() if mesh.step]
        if fitting:
            mesh = min(fitting, key=lambda mesh: mesh.shape.ranks)
            footprint = Footprint(mesh.shape.tp, context, mesh.weight_bytes, mesh.cache_bytes_per_sequence)
            sequences = mesh.copies * mesh.sequences
            return Fit(instance, mesh.shape.tp, mesh.copies, sequences, footprint, mesh.shape, lnc)
    footprint = compute_footprint(model, dtype, tp or list_possible_tp(model, cores)[-1], context)
    copies = cores // tp if tp else 0
    sequences = copies * footprint.sequences(capacity)
    return Fit(instance, tp, copies, sequences, footprint, MeshShape(footprint.tp), lnc)
