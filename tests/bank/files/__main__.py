"""`make bank`: run every case of the bank of files and write the outcomes of the verbs as JSON.

The outcome of a case whose tool is not installed stays what it was.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path

from _pytest.outcomes import Skipped

from bank.files.members import CASES
from bank.files.verbs import outcomes

target = Path(sys.argv[1])
known = {row["case"]: row for row in json.loads(target.read_text())} if target.is_file() else {}
rows, wrong = [], []
warnings.simplefilter("ignore")  # of the tools
for name, case in CASES.items():
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = {verb: said.replace(folder, "FOLDER") for verb, said in outcomes(case.make(Path(folder))).items()}
            rows.append({"case": name, "origin": case.origin, "outcomes": found})
        except Skipped as missing:
            rows += [known[name]] if name in known else []
            sys.stderr.write(f"{name}: not run: {missing}\n")
        except Exception as error:  # whatever is wrong with one case, the others have outcomes
            wrong.append(f"{name}: {type(error).__name__}: {error}")
target.write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n")
sys.stdout.write("\n".join([f"{len(rows)} of {len(CASES)} cases have outcomes", *wrong, ""]))
sys.exit(bool(wrong))
