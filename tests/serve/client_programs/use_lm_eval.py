"""lm-eval: a task with choices, which scores prompts, and a task that generates, both with data of this folder."""

import json
import sys
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": "Tom had a", "choices": [" dog", " qzx"]},
    {"question": "The sun was", "choices": [" bright", " qzx"]},
]
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
{fields}
"""
CHOICES = """output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"""
GENERATION = """output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]"""


def main() -> None:
    """Evaluate the server's model, with the server as the tokenizer."""
    url, _, scratch = sys.argv[1:]
    data = Path(scratch) / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    for name, fields in (("choices", CHOICES), ("generation", GENERATION)):
        task = TASK.format(name=name, data=data, fields=fields)
        Path(scratch, f"{name}.yaml").write_text(task, encoding="utf-8")
    arguments = (
        f"model=stories,base_url={url}/completions,tokenizer_backend=remote,max_length=256,max_retries=1"
    )
    evaluation = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=arguments,
        tasks=["choices", "generation"],
        task_manager=TaskManager(include_path=scratch),
    )
    assert evaluation["results"]["choices"]["acc,none"] == 1.0
    assert "exact_match,none" in evaluation["results"]["generation"]


main()
