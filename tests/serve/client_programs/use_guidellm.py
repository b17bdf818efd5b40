"""guidellm: a benchmark of four requests, one after the other, each of which is to succeed."""

import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run the command of this environment, and read its report."""
    url, folder, scratch = sys.argv[1:]
    report = Path(scratch) / "report.json"
    words = {
        "backend": f"kind=openai_http,target={url.removesuffix('/v1')},model=stories",
        "profile": "kind=synchronous",
        "constraint": "kind=max_requests,count=4",
        "tokenizer": f"kind=hf_auto,model={folder}",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "output": f"kind=json,path={report}",
    }
    command = str(Path(sys.executable).with_name("guidellm"))
    options = [word for name, argument in words.items() for word in (f"--{name}", argument)]
    subprocess.run([command, "run", *options, "--disable-console"], check=True)
    totals = json.loads(report.read_text(encoding="utf-8"))["benchmarks"][0]["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (4, 0), totals


main()
