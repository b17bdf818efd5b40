"""Records of the serving stacks that `nkw plan --stack` knows, and the published runs that one of them was fitted to.

`python -m benchmarks.stacks` fits the numbers marked `fitted`. It also prints `RUNS`, and the errors of the fit on the
runs that it used and on those that it did not use.
"""

from __future__ import annotations

from model.plan.origin import Confidence, Origin
from model.plan.stacks import Fact, HostTime, Padding, PublishedRun, Sampling, Scale, Stack

_RECORDED = "2026-11-28"

_OWN = Origin("the launches of this project", Confidence.documented)
_HOST = Origin(
    "CPU time of the engine without its launches, 1 to 64 slots, one core of an AMD EPYC, 2026-11-28 (python -m "
    "benchmarks.stacks --host)",
    Confidence.measured,
)
_KERNELS = Origin("the kernels of this project; no chip has run them in this engine", Confidence.assumed)

_TABLES = Origin(
    "Neuron documentation, tables of Transformers NeuronX 2.18 on trn1 and inf2: fitted to 13 runs",
    Confidence.fitted,
)
_NEURONX = Origin(
    "Neuron documentation, Transformers NeuronX developer guide: buckets", Confidence.documented
)
_AS_NEURONX = Origin("as fitted for Transformers NeuronX, the library before it", Confidence.derived)
_TRN2_PROMPTS = Origin(
    "published times to first token of dense models on trn2: 0.32 to 0.42 of the peaks, here the middle",
    Confidence.derived,
)
_TRN2_STEPS = Origin(
    "published runs of vLLM on trn2: 3 to 8 ms a step at up to 8 slots, nearly independent of the model's size",
    Confidence.derived,
)
_VLLM_NEURON = Origin("Neuron documentation 2.33, vLLM Neuron: configuration options", Confidence.documented)
_NXDI = Origin("Neuron documentation 2.28, NxD Inference API guide", Confidence.documented)
_OPTIMUM = Origin(
    "neuron_config.json of exported models, optimum-neuron 0.4: enable_bucketing and on_device_sampling are false",
    Confidence.documented,
)
_HOST_SAMPLING = Origin(
    "three times the step of vLLM on trn2: sampling on the host takes several times as long",
    Confidence.assumed,
)
_UNKNOWN = Origin("no published run tells it apart; as this project's kernels", Confidence.assumed)

RUNS: tuple[PublishedRun, ...] = (
    PublishedRun(2, 7.2, 8, 8192, 2.15, 0.9, 1.07),
    PublishedRun(2, 13.0, 8, 4096, 1.77, 0.91, 1.06),
    PublishedRun(2, 13.0, 4, 8192, 0.82, 0.99, 1.01),
    PublishedRun(2, 70.6, 1, 2048, 0.99, 1.04, 0.97),
    PublishedRun(2, 70.6, 1, 1024, 0.94, 1.02, 0.99),
    PublishedRun(2, 70.6, 1, 1024, 0.93, 1.0, 1.01),
    PublishedRun(2, 70.6, 1, 128, 0.95, 0.98, 1.02),
    PublishedRun(2, 70.6, 1, 256, 0.93, 0.98, 1.03),
    PublishedRun(2, 69.0, 1, 256, 0.9, 1.01, 0.99),
    PublishedRun(2, 69.0, 1, 128, 0.91, 1.01, 0.99),
    PublishedRun(2, 7.2, 1, 128, 1.25, 1.08, 0.95),
    PublishedRun(2, 7.2, 1, 8192, 0.42, 1.35, 0.75),
    PublishedRun(2, 7.2, 8, 128, 1.41, 1.25, 0.89),
)
"""The fitted half of the published runs: generation, parameters in thousands of millions, batch, prompt, and published
over predicted time to first token, time per token and throughput."""

THIS = Stack(
    name="this",
    title="this project's engine",
    date=_RECORDED,
    prompt_padding=Fact(Padding.pages, _OWN),
    cache_padding=Fact(Padding.pages, _OWN),
    sampling=Fact(Sampling.device, _OWN),
    experts=Fact("only the experts that tokens choose", _OWN),
    step_engine=HostTime(0.18, 0.08, _HOST),
    prompt_engine=HostTime(0.30, 0.12, _HOST),
    decode_scale=Scale(None, _KERNELS),
    prompt_scale=Scale(None, _KERNELS),
    attention_scale=Scale(None, _KERNELS),
    prompt_share=Scale(None, _KERNELS),
    note="No chip has run this engine.",
)

TRANSFORMERS_NEURONX = Stack(
    name="transformers-neuronx",
    title="Transformers NeuronX",
    date=_RECORDED,
    prompt_padding=Fact(Padding.powers_of_two, _NEURONX),
    cache_padding=Fact(Padding.powers_of_two, _NEURONX),
    sampling=Fact(Sampling.device, _UNKNOWN),
    experts=Fact("all experts for all tokens", _UNKNOWN),
    step_engine=HostTime(3.3, 0.0, _TABLES),
    prompt_engine=HostTime(2.0, 4.0, _TABLES),
    decode_scale=Scale(1.09, _TABLES),
    prompt_scale=Scale(1.3, _TABLES),
    attention_scale=Scale(32.0, _TABLES),
    prompt_share=Scale(None, _TABLES),
    runs=RUNS,
    note="The library before NxD Inference; most published tables are its runs.",
)

NXDI = Stack(
    name="nxdi",
    title="NxD Inference",
    date=_RECORDED,
    prompt_padding=Fact(Padding.powers_of_two, _NXDI),
    cache_padding=Fact(Padding.powers_of_two, _NXDI),
    sampling=Fact(Sampling.device, _NXDI),
    experts=Fact("blocks of chosen experts for prompts, chosen or all experts for steps", _NXDI),
    step_engine=HostTime(3.3, 0.0, _AS_NEURONX),
    prompt_engine=HostTime(2.0, 4.0, _AS_NEURONX),
    decode_scale=Scale(None, _UNKNOWN),
    prompt_scale=Scale(None, _UNKNOWN),
    attention_scale=Scale(None, _UNKNOWN),
    prompt_share=Scale(0.37, _TRN2_PROMPTS),
)

VLLM_NEURON = Stack(
    name="vllm-neuron",
    title="vLLM on Neuron",
    date=_RECORDED,
    prompt_padding=Fact(Padding.powers_of_two, _VLLM_NEURON),
    cache_padding=Fact(Padding.powers_of_two, _VLLM_NEURON),
    sampling=Fact(Sampling.device, _VLLM_NEURON),
    experts=NXDI.experts,
    step_engine=HostTime(5.0, 0.0, _TRN2_STEPS),
    prompt_engine=HostTime(5.0, 0.0, _TRN2_STEPS),
    decode_scale=Scale(None, _UNKNOWN),
    prompt_scale=Scale(None, _UNKNOWN),
    attention_scale=Scale(None, _UNKNOWN),
    prompt_share=Scale(0.37, _TRN2_PROMPTS),
)

OPTIMUM = Stack(
    name="optimum",
    title="optimum-neuron",
    date=_RECORDED,
    prompt_padding=Fact(Padding.sequence_length, _OPTIMUM),
    cache_padding=Fact(Padding.sequence_length, _OPTIMUM),
    sampling=Fact(Sampling.host, _OPTIMUM),
    experts=NXDI.experts,
    step_engine=HostTime(15.0, 0.0, _HOST_SAMPLING),
    prompt_engine=HostTime(15.0, 0.0, _HOST_SAMPLING),
    decode_scale=Scale(None, _UNKNOWN),
    prompt_scale=Scale(None, _UNKNOWN),
    attention_scale=Scale(None, _UNKNOWN),
    prompt_share=Scale(0.37, _TRN2_PROMPTS),
)

STACKS = {stack.name: stack for stack in (THIS, VLLM_NEURON, NXDI, OPTIMUM, TRANSFORMERS_NEURONX)}
"""The records by the name of `--stack`."""
