"""`nkw plan --recommend`: instances for a load, their cost and latency; and `--bench-script`."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest

from model.config.published import PUBLISHED
from model.device import INSTANCES, find_instance
from model.errors import ModelError
from model.llm.vllm_options import VERSION
from model.plan import bench_script, policy
from model.plan.bench_script import script_plan, script_recommendation
from model.plan.dry import Time
from model.plan.memory import MeshShape
from model.plan.plan import Request, make_plan
from model.plan.predict import PassTime
from model.plan.prices import Price
from model.plan.recommend import MOST_INSTANCES, Load, Offer, Recommendation, recommend
from model.plan.recommend_text import format_recommendation
from model.plan.service_level import ServiceLevel
from model.plan.sizes import ModelSizes, load_model
from model.plan.stacks import Served
from nkw.commands import build_parser, main
from nkw.terminal import rendered
from tests.model.test_plan_command import printed, refused
from tests.model.test_plan_parameters import GEMMA3N
from tests.model.test_plan_predict import tiny

LEVEL = ServiceLevel(ttft=500e6, itl=50e6)
ANY = ServiceLevel()


class Rooflines:
    """A predictor whose times follow from the ranks; it records the meshes that it was asked for."""

    calls: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, config: Any, target: str, tp: int, *sizes: Any, **formats: Any) -> None:
        self.target, self.tp = target, tp

    def predict_step(self, batch: int) -> PassTime:
        return PassTime(Time.exact(100e6 / self.tp + 0.5e6 * self.tp + 0.1e6 * batch), ())

    def predict_prompts(self, tokens: int, batch: int = 1) -> PassTime:
        self.calls.append((self.target, self.tp))
        return PassTime(Time.exact(1e6 * tokens / self.tp), ())


@pytest.fixture
def rooflines(monkeypatch) -> list[tuple[str, int]]:
    monkeypatch.setattr(policy, "Predictor", Rooflines)
    Rooflines.calls.clear()
    return Rooflines.calls


def model(name: str = "llama-3.1-8b") -> ModelSizes:
    return load_model(PUBLISHED / f"{name}.json")


def find(rate: float, *names: str, batch: int | None = None, **changes: Any) -> Recommendation:
    request = Request(**{"prompt": 512, "generate": 128, "dtype": "bfloat16", "level": LEVEL, **changes})
    return recommend(model(), request, names, rate, batch, lambda name: None)


def make_offer(rate: float = 3.0, level: ServiceLevel = ANY, **changes: Any) -> Offer:
    """Return an offer of 8 slots whose cycle is 1.5 s: prompts of 100 ms, 100 steps of 7 ms, 5.33 requests/s."""
    offer = Offer(
        *(Load(rate, 512, 101, level), find_instance("trn2.48xlarge"), 2, MeshShape(8), 4, 8),
        *(Served(Time.exact(99e6), 1e6), Served(Time.exact(6e6), 1e6), True, Price(36.0)),
    )
    return replace(offer, **changes)


def test_a_cycle_has_a_request_of_every_slot() -> None:
    offer = make_offer()
    assert offer.cycle_ns == pytest.approx(8 * 100e6 + 100 * 7e6)
    assert offer.copy_requests_per_s == pytest.approx(8 / 1.5)
    assert offer.mean_itl_ns == pytest.approx((7 * 100e6 + 100 * 7e6) / 100)
    groups = make_offer(shape=MeshShape(8, ep=4))
    assert groups.cycle_ns == pytest.approx(2 * 100e6 + 100 * 7e6)
    single = make_offer(load=Load(3.0, 512, 1, ANY))
    assert (single.cycle_ns, single.mean_itl_ns) == (pytest.approx(800e6), 0.0)
    assert single.e2e_ns == single.ttft_ns == pytest.approx(single.wait_ns + 100e6)


@pytest.mark.parametrize(
    ("rate", "copies", "instances"),
    [(5.33, 1, 1), (5.34, 2, 1), (21.33, 4, 1), (21.34, 5, 2), (5.33e9, 999_375_001, None)],
)
def test_as_many_copies_and_instances_as_the_load_needs(rate, copies, instances) -> None:
    offer = make_offer(rate)
    assert offer.needed_copies == copies
    assert offer.instances == (-(-copies // 4) if instances is None else instances)
    assert offer.chips == 16 * offer.instances
    assert offer.utilisation == pytest.approx(rate * 1.5 / 8 / (4 * offer.instances))
    assert offer.utilisation < 1
    assert offer.dollars_per_hour == 36.0 * offer.instances
    assert offer.is_kept == (offer.instances <= MOST_INSTANCES)


def test_one_slot_waits_as_long_as_the_theory_of_queues_says() -> None:
    """Pollaczek and Khinchine: rho / (2 (1 - rho)) of a constant time, which the approximation is for one server."""
    offer = make_offer(batch=1, copies=1, load=Load(0.5, 512, 101, ANY))
    cycle_ns = 100e6 + 700e6
    utilisation = 0.5 * cycle_ns / 1e9
    assert offer.utilisation == pytest.approx(utilisation)
    assert offer.wait_ns == pytest.approx(cycle_ns * utilisation / (2 * (1 - utilisation)))
    assert offer.ttft_ns == pytest.approx(offer.wait_ns + 100e6)
    assert offer.e2e_ns == pytest.approx(offer.ttft_ns + 100 * offer.mean_itl_ns)


def test_copies_are_added_until_the_wait_keeps_the_level() -> None:
    for bound_ns in (101e6, 110e6, 200e6, 1e9):
        offer = make_offer(21.0, ServiceLevel(ttft=bound_ns), copies=1)
        assert offer.is_kept and offer.ttft_ns <= bound_ns
        fewer_ns = offer._compute_wait(offer.needed_copies - 1) + 100e6
        assert offer.needed_copies == 4 or fewer_ns > bound_ns
    assert make_offer(21.0, ServiceLevel(ttft=101e6), copies=1).needed_copies > 4
    exact = make_offer(21.0, ServiceLevel(ttft=100e6), copies=1)
    assert exact.ttft_ns == 100e6 and exact.is_kept
    beyond = make_offer(21.0, ServiceLevel(ttft=100e6 - 1), copies=1)
    assert beyond.needed_copies == 4 and beyond.excesses.keys() == {"ttft"}


@pytest.mark.parametrize(("rate", "ep"), product((0.01, 3.0, 100.0), (1, 4)))
def test_the_tokens_pay_for_the_instances(rate, ep) -> None:
    offer = make_offer(rate, shape=MeshShape(8, ep=ep))
    assert offer.dollars_per_million is not None and offer.dollars_per_hour is not None
    prompt, step = offer.dollars_per_million
    paid = rate * 3600 * (512 * prompt + 100 * step) / 1e6
    assert paid == pytest.approx(offer.dollars_per_hour)
    assert make_offer(price=None).dollars_per_million is None


def test_at_full_load_tokens_cost_what_a_plan_says(rooflines) -> None:
    plan = make_plan(model(), Request("trn2.48xlarge", tp=8, batch=8, prompt=512, generate=128, level=ANY))
    (row,) = find(60.0, "trn2.48xlarge", batch=8, tp=8, level=ANY).rows
    (offer,) = row.offers
    dollars = plan.rate.dollars
    assert dollars is not None and offer.dollars_per_million is not None and offer.copies == 8
    prompt, step = (price * offer.utilisation for price in offer.dollars_per_million)
    assert prompt == pytest.approx(dollars.input.program_ns)
    assert step == pytest.approx(dollars.output.program_ns)


def test_every_instance_has_the_best_of_its_meshes(rooflines) -> None:
    recommendation = find(100.0)
    assert [row.instance.name for row in recommendation.rows] == list(INSTANCES)
    for row in recommendation.rows:
        kept = [offer for offer in row.offers if offer.is_kept]
        assert row.offers and row.offers[0].instances == min(offer.instances for offer in kept or row.offers)
        assert len({offer.shape for offer in row.offers}) <= policy.PREDICTED
        assert all(offer.predicted and offer.batch & (offer.batch - 1) == 0 for offer in row.offers)
    cheapest, smallest = recommendation.cheapest, recommendation.smallest
    assert cheapest is not None and smallest is not None
    kept = [offer for offer in recommendation.best if offer.is_kept]
    assert cheapest.dollars_per_hour == min(
        offer.dollars_per_hour for offer in kept if offer.dollars_per_hour is not None
    )
    assert smallest.chips == min(offer.chips for offer in kept)
    assert recommendation.chosen is cheapest


def test_equal_cores_are_predicted_once(rooflines) -> None:
    """Small trn1 and inf2 instances are a chip of equal cores; trn2u.48xlarge has the links of trn2.48xlarge."""
    alone = find(1.0, "trn1.2xlarge")
    count = len(rooflines)
    find(1.0, "trn1.2xlarge", "inf2.xlarge", "inf2.8xlarge")
    assert count and len(rooflines) == 2 * count
    rooflines.clear()
    pair = find(1.0, "trn2.48xlarge", "trn2u.48xlarge")
    assert {target for target, _ in rooflines} == {"trn2.48xlarge"}
    first, second = (row.offers[0] for row in pair.rows)
    assert (first.ttft_ns, first.mean_itl_ns, first.price is None) == (
        second.ttft_ns,
        second.mean_itl_ns,
        False,
    )
    rooflines.clear()
    find(1.0, "trn1.32xlarge", "trn1n.32xlarge")
    assert {target for target, _ in rooflines} == {"trn1.32xlarge", "trn1n.32xlarge"}
    assert alone.rows[0].offers


def test_no_offer_of_the_frontier_is_beaten(rooflines) -> None:
    recommendation = find(100.0)
    frontier = recommendation.frontier
    kept = [
        offer
        for row in recommendation.rows
        for offer in row.offers
        if offer.is_kept and offer.price is not None
    ]
    costs = [offer.dollars_per_hour or 0.0 for offer in frontier]
    times = [offer.e2e_ns for offer in frontier]
    assert len(frontier) > 2 and costs == sorted(costs) and times == sorted(times, reverse=True)
    for offer, other in product(frontier, kept):
        assert (other.dollars_per_hour or 0.0) >= (
            offer.dollars_per_hour or 0.0
        ) or other.e2e_ns > offer.e2e_ns
    for other in kept:
        assert any(
            (offer.dollars_per_hour or 0.0) <= (other.dollars_per_hour or 0.0)
            and offer.e2e_ns <= other.e2e_ns
            for offer in frontier
        )
    assert frontier[0].dollars_per_hour == min(costs)


def test_without_prices_chips_are_the_cost(rooflines) -> None:
    recommendation = find(5.0, "trn3.3xlarge", "trn3 UltraServer Gen1")
    assert recommendation.cheapest is None
    assert recommendation.chosen is recommendation.smallest is not None
    assert [offer.chips for offer in recommendation.frontier] == sorted(
        offer.chips for offer in recommendation.frontier
    )
    text = rendered(format_recommendation(recommendation))
    assert "beats in both number of chips and time" in " ".join(text.split())
    assert "without $: no public price is known" in text


def test_the_engine_time_of_the_stack_is_in_the_times(rooflines) -> None:
    names = ("this", "vllm-neuron", "optimum")
    nkw_offer, vllm, optimum = (
        find(5.0, "trn2.48xlarge", batch=8, tp=8, stack=name).rows[0].offers[0] for name in names
    )
    assert nkw_offer.step_ns < vllm.step_ns < optimum.step_ns
    assert vllm.step.engine_ns == 5e6 and optimum.step.engine_ns == 15e6
    assert nkw_offer.prompt_ns < vllm.prompt_ns < optimum.prompt_ns


def test_a_batch_that_is_given_is_kept(rooflines) -> None:
    for row in find(5.0, "trn2.48xlarge", "inf2.xlarge", batch=24).rows:
        assert {offer.batch for offer in row.offers} <= {24}
    assert {offer.batch for offer in find(5.0, "trn2.48xlarge", batch=24).rows[0].offers} == {24}
    with pytest.raises(ModelError, match="a plan takes at most"):
        find(5.0, "trn2.48xlarge", batch=2**20 + 1)


def test_a_mesh_that_an_instance_cannot_have_is_a_reason_and_no_error(rooflines) -> None:
    fitting, refusing = find(5.0, "trn2.48xlarge", "inf2.xlarge", tp=8).rows
    assert {offer.shape.tp for offer in fitting.offers} == {8} and not fitting.refusal
    assert not refusing.offers and "8 ranks on inf2.xlarge, which has 2 cores" in refusing.refusal


@pytest.fixture
def small(tmp_path, monkeypatch, rooflines) -> str:
    tiny(tmp_path)
    monkeypatch.chdir(tmp_path)
    return "config.json"


def test_the_table_and_the_document_say_the_same(small, capsys) -> None:
    words = "--recommend", "--rate", "50", "--prompt", "16", "--generate", "8", "--sla", "itl=1s"
    text = printed(capsys, small, *words, "--instance", "trn2.48xlarge,inf2.xlarge", "--json", "plan.json")
    document = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert (document["rate"], document["prompt"], document["generate"]) == (50.0, 16, 8)
    assert [row["instance"] for row in document["instances"]] == ["trn2.48xlarge", "inf2.xlarge"]
    for row in document["instances"]:
        offer = row["offer"]
        line = next(line for line in text.splitlines() if line.startswith(f"{row['instance']} "))
        assert f"{offer['dollars_per_hour']:,.2f}" in line and f"{offer['itl_ns'] / 1e6:.2f}" in line
        assert f"{offer['dollars_per_million_output']:,.3f}" in line
    cheapest = document["cheapest"]
    assert cheapest["dollars_per_hour"] == min(
        row["offer"]["dollars_per_hour"] for row in document["instances"]
    )
    assert f"cheapest: {cheapest['instance']}" in text and document["nearest"] is None
    assert document["pareto"][0] == cheapest
    repeated = printed(capsys, small, *words, "--instance", "trn2.48xlarge", "--instance", "inf2.xlarge")
    assert repeated == text


def test_a_load_that_no_instance_keeps_gets_the_nearest_and_status_1(small, capsys) -> None:
    words = small, "--recommend", "--rate", "5", "--prompt", "16", "--generate", "8"
    text = printed(
        capsys, *words, "--sla", "itl=1us", "--instance", "inf2.xlarge", "--json", "plan.json", status=1
    )
    joined = " ".join(text.split())
    assert "no instance keeps itl 0.001 ms at 5 requests/s; nearest is inf2.xlarge with tp" in joined
    assert "times its bound" in joined and "! inf2.xlarge: itl" in joined and "cheapest" not in joined
    document = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert document["cheapest"] is None is document["fewest_chips"] and document["pareto"] == []
    assert document["nearest"]["exceeds"]["itl"] > 1 and not document["nearest"]["keeps_sla"]
    printed(capsys, *words, "--sla", "itl=1s", "--instance", "inf2.xlarge")


def test_a_model_that_no_instance_holds_says_by_how_much(capsys) -> None:
    words = "llama-3.1-405b", "--recommend", "--rate", "5", "--instance", "inf2.xlarge"
    text = " ".join(printed(capsys, *words, status=1).split())
    assert (
        "no instance keeps ttft 500 ms, itl 50 ms at 5 requests/s; none holds the model: inf2.xlarge: does"
        in text
    )
    assert "GB" in text


def test_a_family_without_kernels_gets_rooflines_with_a_range(tmp_path, capsys, monkeypatch) -> None:
    tiny(tmp_path, **GEMMA3N)
    monkeypatch.chdir(tmp_path)
    words = "--recommend", "--rate", "5", "--instance", "trn2.48xlarge", "--json", "plan.json"
    text = " ".join(printed(capsys, "config.json", *words).split())
    assert "Times are rooflines, because no kernel of this project computes" in text
    document = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    assert not document["cheapest"]["predicted"]


@pytest.mark.parametrize("rate", ["1e-6", "1e9"])
def test_extreme_loads_have_finite_numbers_and_whole_names(small, capsys, rate) -> None:
    words = small, "--recommend", "--rate", rate, "--prompt", "1", "--generate", "2", "--sla", "itl=9s"
    text = printed(capsys, *words, "--instance", "inf2.xlarge,trn2.3xlarge", "--json", "plan.json")
    document = json.loads(Path("plan.json").read_text(encoding="utf-8"))
    json.dumps(document, allow_nan=False)
    assert "…" not in text and "cheapest: " in text
    offers = [row["offer"] for row in document["instances"]]
    if rate == "1e9":
        assert [offer["keeps_sla"] for offer in offers] == [offer["instances"] <= 10**6 for offer in offers]
        assert not offers[0]["keeps_sla"] and "instances, more than 1,000,000" in text
    else:
        assert [offer["instances"] for offer in offers] == [1, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--recommend", "--recommend compares instances for a load: give --rate, its requests a second"),
        ("--rate 5", "--rate is the load of --recommend: add --recommend, or leave --rate out"),
        ("--recommend --rate 0", "'0' is not a number from 1e-06 to 1e+09"),
        ("--recommend --rate -1", "'-1' is not a number from 1e-06 to 1e+09"),
        ("--recommend --rate nan", "'nan' is not a number from 1e-06 to 1e+09"),
        ("--recommend --rate inf", "'inf' is not a number from 1e-06 to 1e+09"),
        ("--recommend --rate 5 --sla tpot=5ms", "write one or more of ttft, itl and e2e"),
        ("--recommend --rate 5 --instance trn2.48xl", "did you mean trn2.48xlarge?"),
        ("--recommend --rate 5 --instance trn2.48xlarge,", "instance '' is not known"),
        (
            "--recommend --rate 5 --accelerator h100",
            "--recommend compares instances: leave --accelerator out",
        ),
        ("--recommend --rate 5 --sp --tp 2", "leave --sp out"),
        ("--recommend --rate 5 --price 3", "--price is that of one instance, and 14 are compared"),
        (
            "--instance trn2.48xlarge,inf2.xlarge",
            "a plan is for one instance, not for 2: --recommend compares",
        ),
        ("--bench-script - --json -", "--bench-script and --json cannot both go to stdout"),
        ("--bench-script same --json same", "it is the file of the script"),
        ("--accelerator h100 --bench-script -", "--bench-script starts a server on an instance"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(small, capsys, words, message) -> None:
    assert message in refused(capsys, small, *words.split())


def test_a_price_is_taken_for_one_instance(small, capsys) -> None:
    words = small, "--recommend", "--rate", "5", "--instance", "trn3.3xlarge", "--price", "7.5"
    assert "cheapest: trn3.3xlarge, 1 chip" in printed(capsys, *words)


def script_words(script: str, command: str) -> list[str]:
    """Return the words of a command of a script after the shell has read them; the model is `MODEL`."""
    start = next(index for index, line in enumerate(script.splitlines()) if line.strip().startswith(command))
    lines = script.splitlines()[start:]
    end = next(index for index, line in enumerate(lines) if not line.endswith("\\"))
    text = "\n".join(lines[: end + 1]).rstrip("&")
    shell = f'model=MODEL url=http://127.0.0.1:9; print() {{ printf "%s\\n" "$@"; }}; print {text}'
    return subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, check=True
    ).stdout.splitlines()


def parsed_by_bash(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_the_script_of_a_plan_has_options_that_our_parsers_take(rooflines) -> None:
    level = ServiceLevel(ttft=500e6, itl=50e6, e2e=10e9)
    request = Request("trn2.48xlarge", tp=8, batch=8, prompt=512, generate=128, level=level)
    plan = make_plan(model(), request)
    script = script_plan(plan, PUBLISHED / "llama-3.1-8b.json")
    assert parsed_by_bash(script) and "model=meta-llama/Llama-3.1-8B\n" in script
    words = script_words(script, "nkw bench serve")
    options = build_parser(["bench", "serve"]).parse_args(words[1:])
    assert (options.random_input_len, options.random_output_len, options.ignore_eos) == (512, 128, True)
    assert dict(options.goodput) == {"ttft": 500.0, "tpot": 50.0, "e2el": 10_000.0}
    assert options.max_concurrency == 8 and options.num_prompts == 80
    rate = plan.rate.request_tokens_per_s
    assert rate is not None
    assert options.request_rate == pytest.approx(rate / 128 / plan.placement.mesh.copies, rel=0.01)
    words = script_words(script, "nkw serve")
    serve = build_parser(["serve"]).parse_args([word.replace("MODEL", "stories") for word in words[1:]])
    assert (serve.tp, serve.max_num_seqs, serve.max_model_len, serve.port) == (8, 8, 640, 8000)
    assert (serve.backend, serve.target, serve.dtype) == ("neuron", "trn2", "bfloat16")
    assert "  export NEURON_LOGICAL_NC_CONFIG=2\n" in script and VERSION == bench_script.VLLM


@pytest.mark.parametrize(
    ("stack", "server"),
    [
        ("vllm-neuron", "vllm serve MODEL --tensor-parallel-size 8 --max-num-seqs 8 --max-model-len 640"),
        ("nxdi", "vllm serve MODEL --tensor-parallel-size 8 --max-num-seqs 8 --max-model-len 640"),
        (
            "optimum",
            "optimum-cli neuron serve --model MODEL --tensor_parallel_size 8 --batch_size 8 --sequence_length 640",
        ),
        (
            "transformers-neuronx",
            "python3 -m vllm.entrypoints.openai.api_server --model MODEL --device neuron --tensor-parallel-size 8",
        ),
    ],
)
def test_each_stack_has_its_server(rooflines, stack, server) -> None:
    recommendation = find(10.0, "trn1.32xlarge", batch=8, tp=8, stack=stack)
    script = script_recommendation(recommendation, PUBLISHED / "llama-3.1-8b.json")
    command, _, _ = server.partition(" MODEL")
    assert parsed_by_bash(script) and "LOGICAL_NC" not in script
    assert " ".join(script_words(script, command.partition(" --model")[0])).startswith(server)
    words = script_words(script, "vllm bench serve")
    options = build_parser(["bench", "serve"]).parse_args(words[1:])
    offer = recommendation.chosen
    assert offer is not None and options.model_name == "MODEL"
    assert options.request_rate == pytest.approx(10.0 / (offer.instances * offer.copies), rel=1e-5)
    assert f"(record of {recommendation.stack.date}), ttft 500 ms, itl 50 ms" in script


def test_a_server_without_stages_or_groups_refuses_such_a_mesh(rooflines) -> None:
    mesh = find(10.0, "trn2.48xlarge", batch=8, tp=8, pp=2, level=ANY)
    with pytest.raises(ModelError, match="nkw serve has no mesh of tp 8 pp 2; plan with --pp 1"):
        script_recommendation(mesh, PUBLISHED / "llama-3.1-8b.json")
    stages = find(10.0, "trn2.48xlarge", batch=8, tp=8, pp=2, level=ANY, stack="vllm-neuron")
    script = script_recommendation(stages, PUBLISHED / "llama-3.1-8b.json")
    assert "--pipeline-parallel-size 2 " in script and "--goodput" not in script


@pytest.mark.parametrize("folder", ["a b", "quote's $(touch hacked) `x`", "line\nbreak", "-dash"])
def test_names_are_quoted(tmp_path, monkeypatch, rooflines, folder) -> None:
    path = tmp_path / folder
    path.mkdir()
    tiny(path)
    monkeypatch.chdir(tmp_path)
    plan = make_plan(load_model(path), Request(tp=2, prompt=16, generate=8))
    for config in (path, path / "config.json"):
        script = script_plan(plan, config)
        assert parsed_by_bash(script)
        start, end = script.index("model="), script.index("url=")
        shell = f'set -eu\n{script[start:end]}printf %s "$model"'
        for words, wanted in (([], str(path)), (["bash", "other"], "other")):
            done = subprocess.run(["bash", "-c", shell, *words], capture_output=True, text=True, check=True)
            assert done.stdout == wanted
    assert not (tmp_path / "hacked").exists()
    unnamed = script_plan(plan, path / "llama.json")
    done = subprocess.run(["bash", "-c", unnamed], capture_output=True, text=True, check=False)
    assert done.returncode and "give the folder or the id of the model" in done.stderr


def test_the_script_goes_to_a_file_or_to_stdout(small, capsys) -> None:
    words = small, "--tp", "2", "--prompt", "16", "--generate", "8"
    text = printed(capsys, *words, "--bench-script", "check.sh")
    script = Path("check.sh").read_text(encoding="utf-8")
    assert parsed_by_bash(script) and "one step" in text
    assert main(["plan", *words, "--bench-script", "-"]) == 0
    captured = capsys.readouterr()
    assert captured.out == script and text in captured.err
    large = "llama-3.1-8b", "--instance", "inf2.xlarge", "--batch", "1024", "--bench-script", "none.sh"
    assert main(["plan", *large]) == 1
    capsys.readouterr()
    assert not Path("none.sh").exists()
    assert "this command reads that file" in refused(capsys, *words, "--bench-script", "config.json")


def test_speech_is_not_measured(rooflines) -> None:
    plan = make_plan(load_model(PUBLISHED / "whisper-tiny.json"), Request(tp=1))
    with pytest.raises(ModelError, match="this is a speech model"):
        script_plan(plan, PUBLISHED / "whisper-tiny.json")


@pytest.mark.deep
@pytest.mark.parametrize("rate", [1.0, 100.0])
def test_the_best_of_all_meshes_is_found_by_dry_runs(monkeypatch, rate) -> None:
    """Leaving out meshes by their estimates costs no instance, compared with all of the three best."""
    names = "trn2.3xlarge", "trn2.48xlarge", "inf2.24xlarge"
    recommendation = find(rate, *names)
    monkeypatch.setattr(
        "model.plan.recommend._lengthen", lambda estimate, pairs: replace(estimate, price=None)
    )
    for row, other in zip(recommendation.rows, find(rate, *names).rows, strict=True):
        assert row.offers[0].instances == other.offers[0].instances
