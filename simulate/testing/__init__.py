"""Testing kernels: run one, compare it with a reference at derived tolerances, and apply the detectors to it.

`KernelChecker` does all three and works in any test framework; `simulate.pytest_plugin` offers it as the
fixture `check_kernel`. `BudgetChecker` checks a kernel's predicted time, HBM traffic and SBUF against stated
limits. `tolerance` and `compare` judge arrays; `strategies` (a module of its own, as it needs hypothesis)
draws shapes, dtypes, tiles and views; `artifacts` writes the files of a failure. The truth is what the
reference returns, in float64.
"""

from simulate.testing.budget import Budget, BudgetChecker, BudgetExceeded, Predicted
from simulate.testing.compare import Comparison, Mismatch, WeakComparison, compare
from simulate.testing.kernel import Checked, CheckLevel, KernelChecker, KernelFailure
from simulate.testing.tolerance import roundoff, tolerance

__all__ = [
    "Budget",
    "BudgetChecker",
    "BudgetExceeded",
    "CheckLevel",
    "Checked",
    "Comparison",
    "KernelChecker",
    "KernelFailure",
    "Mismatch",
    "Predicted",
    "WeakComparison",
    "compare",
    "roundoff",
    "tolerance",
]
