"""Options of `vllm serve` 0.33.0 and what each one means here; spellings of SGLang and transformers are aliases.

Followed are `vllm/engine/arg_utils.py`, `vllm/entrypoints/common/cli_args.py` and `vllm/config/*.py` of vLLM 0.33.0
(November 2026). Names of earlier versions follow at the end of the tables. `model.commands.options.vllm` adds the
options to the parsers of commands; `LLM` reads its keywords by the same tables.

A key of a table has names separated by blanks. `--name` is a switch, which also has the names --no-name and, for
--enable-name, --disable-name; `--no-name` is a switch that vLLM sets by default. `--name=DEFAULT` takes a value, and
DEFAULT, vLLM's default, is accepted in silence in every table. `--name=` takes a value without such a default.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from model.errors import ModelError
from nkw.suggestions import did_you_mean

VERSION = "0.33.0"
"""Version of vLLM whose options these are."""


@dataclass(frozen=True)
class Equivalent:
    """What an option of vLLM means in the options of this project.

    A row is a row of this project's tables of options, such as "--tp".

    | field | meaning |
    |---|---|
    | `rows` | names of rows in order of preference, separated by blanks: the first one that a command has is meant |
    | `argument` | field of EngineArgs; empty for an option of the command line alone |
    | `sets` | for a switch: the attribute of the parsed options that it sets |
    | `inverted` | whether the switch sets False |
    | `key` | key of the JSON object that the row takes; the option sets this key |
    """

    rows: str
    argument: str = ""
    sets: str = ""
    inverted: bool = False
    key: str = ""

    def read(self, value: Any, current: Any) -> Any:
        """Return the value of this project's option for a value of vLLM's option.

        Args:
            value: value of vLLM's option.
            current: value of this project's option so far; if `key` is set, the key is added to this JSON object.
        """
        if self.key:
            return {**(current or {}), self.key: value}
        return value is not self.inverted if self.sets else value


EQUIVALENT: Mapping[str, Equivalent] = {
    "--model= --model-path= --model-name-or-path=": Equivalent("--model", "model"),
    "--tensor-parallel-size= -tp= --tp-size=": Equivalent("--tp", "tensor_parallel_size"),
    "--pipeline-parallel-size= -pp= --pp-size=": Equivalent("--pp"),
    "--data-parallel-size= -dp= --dp-size=": Equivalent("--dp --replicas"),
    "--enable-expert-parallel -ep": Equivalent("--replicas", sets="expert_parallel"),
    "--dtype= --torch-dtype=": Equivalent("--dtype --dtype=PLANNED", "dtype"),
    "--seed= --random-seed=": Equivalent("--seed", "seed"),
    "--max-model-len= --context-length=": Equivalent("--max-model-len", "max_model_len"),
    "--max-num-seqs= --max-running-requests=": Equivalent("--max-num-seqs", "max_num_seqs"),
    "--max-num-batched-tokens= --chunked-prefill-size=": Equivalent(
        "--max-num-batched-tokens", "max_num_batched_tokens"
    ),
    "--max-num-queued-reqs= --max-queued-requests=": Equivalent("--max-queue"),
    "--block-size= --page-size=": Equivalent("--block-size", "block_size"),
    "--num-gpu-blocks-override=": Equivalent("--num-pages", "num_pages"),
    "--kv-cache-dtype=": Equivalent("--kv-cache-dtype", "kv_cache_dtype"),
    "--quantization= -q=": Equivalent("--quantization", "quantization"),
    "--mamba-block-size=": Equivalent("--mamba-block-size", "mamba_block_size"),
    "--enable-prefix-caching": Equivalent(
        "--no-prefix-caching", "enable_prefix_caching", sets="prefix_caching"
    ),
    "--disable-radix-cache": Equivalent(
        "--no-prefix-caching", "enable_prefix_caching", sets="prefix_caching", inverted=True
    ),
    "--enable-chunked-prefill": Equivalent(
        "--no-chunked-prefill", "enable_chunked_prefill", sets="chunked_prefill"
    ),
    "--speculative-config= -sc=": Equivalent("--speculative-config", "speculative_config"),
    "--spec-method= --speculative-config.method=": Equivalent(
        "--speculative-config", "speculative_config", key="method"
    ),
    "--spec-model= --speculative-config.model= --speculative-draft-model-path=": Equivalent(
        "--speculative-config", "speculative_config", key="model"
    ),
    "--spec-tokens= --speculative-config.num_speculative_tokens= --speculative-num-draft-tokens=": Equivalent(
        "--speculative-config", "speculative_config", key="num_speculative_tokens"
    ),
    "--speculative-config.prompt_lookup_max=": Equivalent(
        "--speculative-config", "speculative_config", key="prompt_lookup_max"
    ),
    "--speculative-config.prompt_lookup_min=": Equivalent(
        "--speculative-config", "speculative_config", key="prompt_lookup_min"
    ),
    "--served-model-name=": Equivalent("--served-model-name"),
    "--host=": Equivalent("--host"),
    "--port=": Equivalent("--port"),
    "--allowed-origins=": Equivalent("--allowed-origins"),
    "--tool-call-parser=": Equivalent("--tool-call-parser"),
    "--log-level=": Equivalent("--log-level"),
    "--device=": Equivalent("--backend", "backend"),
    "--max-tokens=": Equivalent("--max-new-tokens"),
    "--num-return-sequences=": Equivalent("-n|--n"),
}
"""Options with an equivalent. A command without the row takes the option by the next tables."""

_MEMORY = (
    "memory is not shared out by a fraction; the cache has --num-pages pages, by default as many as --max-num-seqs "
    "sequences of --max-model-len positions fill"
)
_GPU = "it chooses among kernels, graphs and collectives of GPUs; NeuronCores run the kernels of nki_kernels"
_LOADING = "weights are mapped from the safetensors files of the folder and read when they are used"
_ALWAYS = "the server does so always"
_LOGS = "the server logs one line for each request, without texts of clients; --log-level says how much"

ACCEPTED_SILENTLY: Mapping[str, str] = {
    "--enable-auto-tool-choice": "tool_choice auto is always answered where the chat template knows tools",
    "--trust-remote-code": "no code of a folder is ever executed; known families need none",
    "--enforce-eager --disable-cuda-graph": "there are no CUDA graphs",
    "--disable-custom-all-reduce --disable-nccl-for-dp-synchronization": "collectives are those of NKI",
    "--language-model-only --skip-mm-profiling": "images and videos are not read",
    "--enable-prompt-tokens-details --enable-tokenizer-info-endpoint --enable-request-id-headers": _ALWAYS,
    "--enable-metrics --disable-fastapi-docs --exclude-tools-when-tool-choice-none": _ALWAYS,
    "--scheduling-policy=": "requests are scheduled by priority, and requests of one priority by arrival",
    "--served-model-name=": "only a server has a name for its model",
    "--disable-log-stats --disable-log-requests --enable-log-requests --max-log-len=": _LOGS,
    "--disable-uvicorn-access-log --uvicorn-log-level= --disable-access-log-for-endpoints=": _LOGS,
    "--aggregate-engine-logging --no-enable-log-deltas": _LOGS,
    "--disable-cascade-attn": "there is no cascade attention",
    "--use-tqdm-on-load": "weights are mapped and not copied",
    "--safetensors-load-strategy= --safetensors-prefetch-num-threads=": _LOADING,
    "--safetensors-prefetch-block-size= --max-parallel-loading-workers=": _LOADING,
    "--disable-hybrid-kv-cache-manager": "each window of layers has pages of its own where they need fewer",
    "--use-v2-block-manager": "there is one block manager",
}
"""Options accepted in silence: they ask for what is so anyway, or change nothing that a client sees."""

IGNORED: Mapping[str, str] = {
    "--gpu-memory-utilization= --device-memory-utilization= --mem-fraction-static=": _MEMORY,
    "--kv-cache-memory-bytes=": _MEMORY,
    "--attention-backend= --mamba-backend= --mamba-ssu-algorithm= --moe-backend= --linear-backend=": _GPU,
    "--sparse-indexer-topk-backend= --gdn-prefill-backend= --kda-prefill-backend= --kda-decode-backend=": _GPU,
    "--all2all-backend= --dcp-comm-backend= --ir-op-priority= --monokernel --enable-flashinfer-autotune": _GPU,
    "--cudagraph-capture-sizes= --max-cudagraph-capture-size= --compilation-config= -cc=": _GPU,
    "--attention-config= -ac= --kernel-config= --mamba-config= --optimization-level= -O=": _GPU,
    "--performance-mode= --jit-monitor-mode= --jit-monitor-verbose --enable-shm-tensor-arena": _GPU,
    "--enable-cumem-allocator --enable-nccl-comm-suspend": _GPU,
    "--enable-dbo --ubatch-size= --dbo-decode-token-threshold= --dbo-prefill-token-threshold=": _GPU,
    "--enable-batch-sharded-sampling --dp-sync-interval= --dcp-q-replicate --enable-hc-sp": _GPU,
    "--enable-expert-parallel -ep": (
        "the ranks of a group hold a shard of every expert; --ep N, in LLM expert_parallel_size, divides the experts"
    ),
    "--numa-bind --numa-bind-nodes= --numa-bind-cpus=": "the engine binds no memory; start nkw by numactl",
    "--async-scheduling": "the engine schedules a step once the one before it is done",
    "--distributed-executor-backend=": "the ranks of an engine share a process; torchrun starts one for each rank",
    "--renderer-num-workers= --tokenizer-mode= --skip-tokenizer-init": (
        "tokenizer.json is read by the tokenizers library, in processes whose number is --workers"
    ),
    "--prefix-caching-hash-algo= --prefix-cache-retention-interval= --prefix-match-unit=": (
        "the prefix cache has one way: whole pages of --block-size positions, the oldest is replaced first"
    ),
    "--api-server-count= -asc=": "one process answers HTTP; --workers is the number of its helpers",
    "--watchdog-config= --watermark= --scheduler-reserve-full-isl --prefill-schedule-interval=": (
        "the scheduler has no such setting; it preempts the latest request when pages run out"
    ),
    "--long-prefill-token-threshold= --long-prefill-token-threshold-adaptive --max-num-scheduled-tokens=": (
        "--max-num-batched-tokens alone bounds the tokens of a step"
    ),
    "--kv-cache-metrics --kv-cache-metrics-sample= --cudagraph-metrics --enable-mfu-metrics": (
        "/metrics has a fixed set of series"
    ),
    "--show-hidden-metrics-for-version= --custom-histogram-buckets= --per-request-spec-decode-metrics=": (
        "/metrics has a fixed set of series"
    ),
    "--enable-server-load-tracking --enable-logging-iteration-details --enable-mm-processor-stats": (
        "/metrics has the load of the server"
    ),
    "--additional-config= --override-neuron-config=": (
        "it configures AWS's own model library; --buckets, --max-num-seqs and --dtype are the settings of this one"
    ),
    "--h11-max-incomplete-event-size= --h11-max-header-count=": (
        "--max-body, --max-connections and the timeouts bound what a client can send"
    ),
    "--shutdown-timeout=": "SIGTERM finishes what was begun; a second one stops",
    "--log-error-stack --fail-on-environ-validation": "errors are logged in one line with their source line",
    "--fingerprint-mode= --fingerprint-value=": "answers have no system_fingerprint",
    "--kv-sharing-fast-prefill --swa-bounded-replay --enable-ep-weight-filter": "it saves time on GPUs only",
    "--disable-chunked-mm-input --mm-processor-cache-gb= --mm-processor-cache-type= --mm-encoder-tp-mode=": (
        "images and videos are not read"
    ),
    "--limit-mm-per-prompt= --mm-hasher-algorithm= --mm-shm-cache-max-object-size-mb= --mm-tensor-ipc=": (
        "images and videos are not read"
    ),
    "--mm-encoder-attn-backend= --mm-processor-device= --mm-ipc-gpu-memory-gb= --mm-device-do-normalize": (
        "images and videos are not read"
    ),
    "--swap-space= --preemption-mode=": "preempted requests are computed again",
    "--num-scheduler-steps= --guided-decoding-backend= --max-seq-len-to-capture=": (
        "vLLM has removed it too; structured outputs are compiled by llguidance"
    ),
    "--sampling-backend= --grammar-backend= --cuda-graph-max-bs= --enable-torch-compile": _GPU,
    "--disable-overlap-schedule --enable-mixed-chunk --schedule-conservativeness= --schedule-policy=": (
        "the scheduler has no such setting; it takes requests by priority and arrival"
    ),
    "--max-prefill-tokens=": (
        "the scheduler has no such setting; --max-num-batched-tokens bounds the tokens of a step"
    ),
    "--watchdog-timeout= --decode-log-interval= --log-requests --show-time-cost": _LOGS,
    "--device-map= --attn-implementation= --use-cache --low-cpu-mem-usage": _GPU,
}
"""Options that change neither tokens nor answers and are accepted with one line on stderr, which says why."""

_LORA = (
    "LoRA adapters are not computed; merge the adapter into the weights (merge_and_unload and save_pretrained of peft) "
    "and serve that folder"
)
_MULTIMODAL = "images and videos are not read; serve the text model alone"
_ONE_MACHINE = "an engine runs on one machine; --cluster places --replicas N engines on several ones"
_DOWNLOAD = "models are local folders and nothing is downloaded; download with `hf download NAME --local-dir DIR` first"
_PLUGIN = "no code of others is loaded into the engine"
_CONTEXT_PARALLEL = "a sequence is not divided over ranks; --tp N divides heads"
_TLS = "the server speaks plain HTTP; put a proxy with TLS before it, on the same machine"
_ADDRESS = "the server listens at one TCP address, --host and --port"
_OFFLOAD = "weights and pages stay where the engine computes; give more ranks by --tp N or fewer pages by --num-pages N"
_MOE_BALANCE = "experts are not moved between ranks; --ep N sets the groups of ranks that divide them"
_DISAGGREGATED = "prompts and decoding share an engine; nkw traffic --prefill-replicas predicts dividing them"
_POOLING = "models that embed or classify are not served; nkw serve generates text and transcribes speech"
_TEMPLATE = (
    "the chat template is that of the folder; write it to chat_template.jinja there, or give it to LLM.chat"
)
_SAMPLING = "the default sampling parameters are those of the folder's generation_config.json; edit that file"
_CONFIG = "config.json of the folder is read as it is; edit a copy of the folder"
_QUANTIZATION = (
    "give --quantization fp8 or int8 to quantise plain weights on loading, or serve a quantised folder"
)
_RECURRENT = "recurrent states have the dtype of activations, --dtype, and snapshots every --mamba-block-size positions"
_SLEEP = "an engine cannot sleep or change its weights; stop the server and start it again"
_TRACING = "nothing is traced by OpenTelemetry or a profiler; nkw generate --profile and --trace show predicted times"
_REASONING = "reasoning is not split from the answer; it arrives in content, as the model writes it"
_WATERMARK = "answers are not watermarked"
_BEAMS = "beam search is not there; sample several texts by --n N"

REFUSED: Mapping[str, str] = {
    "--api-key=": (
        "a key on the command line can be read by every user of the machine; write it to a file and give "
        "--api-key-file FILE"
    ),
    "--hf-token=": _DOWNLOAD,
    "--pipeline-parallel-size=1 -pp=1 --pp-size=1": (
        "an engine has no pipeline stages; give --tp N, or nkw generate --pp N"
    ),
    "--data-parallel-size=1 -dp=1 --dp-size=1": (
        "an engine is one group of ranks; nkw serve --replicas N puts N engines behind one port, and "
        "expert_parallel_size is the number of groups that divide experts"
    ),
    "--ep-size=1": "groups of --tp ranks that divide the routed experts are --ep N",
    "--enable-lora --max-loras=1 --max-lora-rank=16 --lora-dtype=auto --max-cpu-loras= --lora-modules=": _LORA,
    "--fully-sharded-loras --lora-target-modules= --default-mm-loras= --enable-tower-connector-lora": _LORA,
    "--specialize-active-lora --enable-mixed-moe-lora-format --enable-moe-shared-loras": _LORA,
    "--max-lora-cls-labels= --lora-paths=": _LORA,
    "--quantization-config= --allow-deprecated-quantization --quantization-param-path=": _QUANTIZATION,
    "--load-in-8bit --load-in-4bit": _QUANTIZATION,
    "--kv-cache-dtype-skip-layers=": "all layers keep their pages in --kv-cache-dtype",
    "--runner=auto --convert=auto --pooler-config= --is-embedding": _POOLING,
    "--task=auto": _POOLING,
    "--no-enable-flash-late-interaction": _POOLING,
    "--tokenizer= --tokenizer-path=": (
        "the tokenizer is the folder's tokenizer.json; copy the other one into a copy of the folder"
    ),
    "--hf-config-path= --config-format=auto --hf-overrides= --model-class-overrides=": _CONFIG,
    "--disable-sliding-window --rope-scaling= --rope-theta= --json-model-override-args=": _CONFIG,
    "--revision= --code-revision= --tokenizer-revision= --download-dir=": _DOWNLOAD,
    "--model-impl=auto": "models are built from the kernels of nki_kernels alone",
    "--load-format=auto": "weights are read from safetensors; convert others by transformers' save_pretrained",
    "--model-loader-extra-config= --ignore-patterns= --pt-load-map-location=cpu --model-weights=": (
        "weights are the safetensors of the folder; convert others by transformers' save_pretrained"
    ),
    "--allowed-local-media-path= --allowed-media-domains= --enable-mm-embeds --media-io-kwargs=": _MULTIMODAL,
    "--mm-processor-kwargs= --mm-encoder-only --mm-encoder-attn-dtype= --interleave-mm-strings": _MULTIMODAL,
    "--mm-encoder-fp8-scale-path= --mm-encoder-fp8-scale-save-path=": _MULTIMODAL,
    "--mm-encoder-fp8-scale-save-margin=1.5 --video-pruning-rate= --video-pruning-method=evs": _MULTIMODAL,
    "--trust-request-mm-kwargs --ec-transfer-config= --ec-manager-config= --io-processor-plugin=": _MULTIMODAL,
    "--enable-prompt-embeds": "a prompt is text or token ids; embeddings are not taken",
    "--master-addr=127.0.0.1 --master-port=29501 --nnodes=1 -n=1 --node-rank=0 -r=0 --headless": _ONE_MACHINE,
    "--distributed-timeout-seconds= --cpu-distributed-timeout-seconds= --dist-init-addr=": _ONE_MACHINE,
    "--data-parallel-rank= -dpn= --data-parallel-start-rank= -dpr= --data-parallel-size-local= -dpl=": (
        _ONE_MACHINE
    ),
    "--data-parallel-address= -dpa= --data-parallel-rpc-port= -dpp= --data-parallel-backend=mp -dpb=mp": (
        _ONE_MACHINE
    ),
    "--data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe": _ONE_MACHINE,
    "--data-parallel-multi-port-external-lb -dpm --data-parallel-supervisor-port=9256": _ONE_MACHINE,
    "--dp-supervisor-probe-interval-s=5 --dp-supervisor-probe-timeout-s=5": _ONE_MACHINE,
    "--dp-supervisor-probe-failure-threshold=3": _ONE_MACHINE,
    "--enable-elastic-ep --elastic-ep-max-dp-size= --enable-fault-tolerance --fault-tolerance-config=": (
        _ONE_MACHINE
    ),
    "--device-ids= --base-gpu-id=0": "NEURON_RT_VISIBLE_CORES chooses the NeuronCores of a process",
    "--decode-context-parallel-size=1 -dcp=1 --prefill-context-parallel-size=1 -pcp=1": _CONTEXT_PARALLEL,
    "--dcp-kv-cache-interleave-size=1 --cp-kv-cache-interleave-size= --enable-dp-attention": (
        _CONTEXT_PARALLEL
    ),
    "--enable-eplb --eplb-config= --expert-placement-strategy=linear": _MOE_BALANCE,
    "--ray-workers-use-nsight --profiler-config= --enable-layerwise-nvtx-tracing": _TRACING,
    "--otlp-traces-endpoint= --collect-detailed-traces= --kv-events-config=": _TRACING,
    "--worker-cls=auto --worker-extension-cls= --scheduler-cls= --logits-processors= --middleware=": _PLUGIN,
    "--tool-parser-plugin= --reasoning-parser-plugin= --tool-server=": _PLUGIN,
    "--enable-mamba-cache-stochastic-rounding --mamba-cache-philox-rounds=0": _RECURRENT,
    "--mamba-cache-dtype=auto --mamba-ssm-cache-dtype=auto --mamba-cache-mode=": _RECURRENT,
    "--enable-mamba-shared-prefix-checkpoint --replayssm-buffer-len=16 --use-replayssm": _RECURRENT,
    "--kv-offloading-size= --kv-offloading-backend=native --offload-backend=auto --cpu-offload-gb=0": _OFFLOAD,
    "--cpu-offload-params= --offload-group-size=0 --offload-num-in-group=1 --offload-prefetch-step=1": (
        _OFFLOAD
    ),
    "--offload-params= --engram-config=": _OFFLOAD,
    "--kv-transfer-config=": _DISAGGREGATED,
    "--tokens-only --enable-scale-out --disaggregation-mode=null": _DISAGGREGATED,
    "--weight-transfer-config= --enable-sleep-mode --sleep-mode-backend=cumem": _SLEEP,
    "--sleep-mode-offload-cudagraph --sleep-preserve-parameter-names=": _SLEEP,
    "--max-logprobs=20": "a request may ask for up to 20 log-probabilities",
    "--logprobs-mode=raw_logprobs": "log-probabilities are those of the model, before penalties and temperature",
    "--return-tokens-as-token-ids": "tokens in log-probabilities are text, with their bytes",
    "--use-fp64-gumbel --enable-trace-replay --return-sampling-mask --enable-return-routed-experts": (
        "the sampler has no such mode; nkw generate --explain shows candidates and experts of a token"
    ),
    "--aux-output-config=": "answers have text, token ids and log-probabilities only",
    "--generation-config=auto --override-generation-config= --preferred-sampling-params=": _SAMPLING,
    "--chat-template= --chat-template-content-format=auto --trust-request-chat-template": _TEMPLATE,
    "--default-chat-template-kwargs= --reasoning-effort-map= --response-role=assistant": (
        "variables of the chat template are chat_template_kwargs of each request"
    ),
    "--reasoning-parser= --reasoning-config=": _REASONING,
    "--tool-strict-level=": "tool_choice of a request decides whether calls are held to their schema",
    "--enable-force-include-usage": "a stream counts its tokens where stream_options.include_usage asks for it",
    "--structured-outputs-config=": (
        "structured outputs are compiled by llguidance; --grammar-cpu-seconds and --grammar-memory bound it"
    ),
    "--enable-per-request-metrics": "times are in /metrics, and not in answers",
    "--enable-log-outputs": "texts of clients are never logged",
    "--logging-config= --log-config-file=": "the log goes to stderr, one line for each event; give --log-level",
    "--sse-keep-alive-interval=0": "a stream is silent between tokens; raise the proxy's timeout of reading",
    "--no-cohere-is-reasoning-model --cohere-format=cmd4 --anthropic-disabled-thinking-effort=auto": (
        "the server has OpenAI's routes only"
    ),
    "--grpc-port= --uds= --grpc": _ADDRESS,
    "--root-path= --allow-credentials": (
        "routes begin at /v1, and browsers send keys in a header; give --allowed-origins for their pages"
    ),
    '--allowed-methods=["*"] --allowed-headers=["*"]': "all methods and headers of the API are allowed",
    "--ssl-keyfile= --ssl-certfile= --ssl-ca-certs= --enable-ssl-refresh --ssl-cert-reqs=0": _TLS,
    "--ssl-ciphers=": _TLS,
    "--enable-offline-docs": "the server has no page of its schema; docs/model/serving.md lists the routes",
    "--config=": "options are read from the command line only; write them to a shell script",
    "--max-num-active-seqs= --max-num-queued-tokens=": (
        "--max-num-seqs bounds the sequences of a step, and --max-queue those that wait"
    ),
    "--stream-interval=1": "each token is streamed when it is there",
    "--watermark-config=": _WATERMARK,
    "--diffusion-config= -dc=": "diffusion models are not computed",
    "--max-total-tokens=": "the cache is sized by --num-pages N pages of --block-size positions",
    "--speculative-algorithm=": (
        "drafts come from the prompt or from a draft model; give --speculative-config "
        "'{\"num_speculative_tokens\": 3}'"
    ),
    "--speculative-model= --num-speculative-tokens= --ngram-prompt-lookup-max=": (
        'vLLM has replaced it by --speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\''
    ),
    "--do-sample": "give --temperature T: 0 takes the most likely token, above 0 samples",
    "--num-beams=1 --length-penalty=1 --early-stopping": _BEAMS,
    "--max-length=": "give --max-new-tokens N, which does not count the prompt",
    "--min-new-tokens=0 --min-length=0 --no-repeat-ngram-size=0": (
        "the length has no lower bound here; give min_tokens in SamplingParams or in a request"
    ),
}
"""Options that are not there: one sentence, why, and what to do instead. Exit status 2; ModelError for `LLM`."""


@dataclass(frozen=True)
class VllmOption:
    """Option of vLLM under one of its names.

    | field | meaning |
    |---|---|
    | `flag` | the name, with its hyphens |
    | `is_switch` | whether it takes no value |
    | `default` | vLLM's default, which is accepted in silence; for a switch whether vLLM sets it |
    | `equivalent` | meaning in options of this project; None for an option without one |
    | `is_refused` | whether it is refused; an option that is not, and has no equivalent, is accepted without effect |
    | `sentence` | why it has no effect or is refused; empty for an option that is accepted in silence |
    """

    flag: str
    is_switch: bool
    default: str | bool | None
    equivalent: Equivalent | None = None
    is_refused: bool = False
    sentence: str = ""

    @property
    def keyword(self) -> str:
        """Keyword of vLLM's `LLM` for this option, such as "max_model_len"."""
        return self.flag.lstrip("-").replace("-", "_")

    def is_default(self, value: Any) -> bool:
        """Return whether a value is vLLM's default, or means that the option is not used, such as None."""
        if self.is_switch:
            return value is None or value is self.default
        if value is None or (isinstance(value, Collection) and not value):
            return True
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return str(value) == self.default


@cache
def list_options() -> Sequence[VllmOption]:
    """Return all options of vLLM, one entry for each name; a name may occur several times.

    Of several entries with a name, the first one that a command has is meant.
    """
    options: list[VllmOption] = []
    for names, equivalent in EQUIVALENT.items():
        options += (VllmOption(*name, equivalent) for name in _split_names(names))
    for names in ACCEPTED_SILENTLY:
        options += (VllmOption(*name) for name in _split_names(names))
    for names, reason in IGNORED.items():
        options += (VllmOption(*name, sentence=reason) for name in _split_names(names))
    for names, reason in REFUSED.items():
        options += (VllmOption(*name, is_refused=True, sentence=reason) for name in _split_names(names))
    return options


def _split_names(names: str) -> Iterator[tuple[str, bool, str | bool | None]]:
    """Yield (flag, whether it is a switch, default) for each name in a key of a table of options.

    A key `--no-name` yields the flag `--name`. The default is the text after "=", which may be empty; for a switch it
    is whether vLLM sets it.
    """
    for name in names.split():
        flag, equals, default = name.partition("=")
        is_set = flag.startswith("--no-")
        yield f"--{flag.removeprefix('--no-')}" if is_set else flag, not equals, default if equals else is_set


def translate_arguments(arguments: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return keywords of vLLM's `LLM` as fields of EngineArgs; warn of keywords that have no effect.

    Args:
        arguments: keywords of vLLM, and fields of EngineArgs.
        fields: names of the fields of EngineArgs.

    Raises:
        ModelError: a keyword is refused, with the reason; or unknown, with the closest known keyword.
    """
    named = {
        option.keyword: option
        for option in reversed(list_options())
        if option.equivalent is None or option.equivalent.argument
    }
    remaining, groups = dict(arguments), arguments.get("data_parallel_size", 1)
    if groups != 1 and remaining.pop("enable_expert_parallel", False):
        remaining["expert_parallel_size"] = remaining.pop("data_parallel_size")
    translated: dict[str, Any] = {}
    for keyword, value in remaining.items():
        option = named.get(keyword)
        if keyword in fields:
            translated[keyword] = value
        elif option is None:
            known = did_you_mean(keyword, {*fields, *named}) or f"; it takes {', '.join(fields)}"
            raise ModelError(f"LLM takes no {keyword}{known}")
        elif option.equivalent is not None:
            if value is not None:
                argument = option.equivalent.argument
                translated[argument] = option.equivalent.read(value, translated.get(argument))
        elif option.is_default(value):
            continue
        elif option.is_refused:
            raise ModelError(f"LLM takes no {keyword}: {option.sentence}")
        elif option.sentence:
            warnings.warn(f"LLM: {keyword} has no effect: {option.sentence}", UserWarning, stacklevel=3)
    return translated
