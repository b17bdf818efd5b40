"""Fields of a diffusers scheduler_config.json; each access checks the type and the range of the field."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any, TypeVar

import numpy as np

from model.errors import ModelError

CODE = "NKW-MODEL-CONFIG"
MOST_TIMESTEPS = 100_000
"""Most training timesteps, betas and solver steps that are read; published models have 1,000."""
_METADATA = ("_class_name", "_diffusers_version", "_use_default_values")
_SWITCHES = frozenset(
    """
    clip_sample euler_at_final invert_sigmas rescale_betas_zero_snr stochastic_sampling thresholding use_beta_sigmas
    use_dynamic_shifting use_exponential_sigmas use_flow_sigmas use_karras_sigmas use_lu_lambdas
    """.split()
)
"""Fields that a class which lacks them ignores if they are false: they ask for a computation only if true."""
_INERT = frozenset(
    "clip_sample_range dynamic_thresholding_ratio sample_max_value set_alpha_to_one skip_prk_steps".split()
)
"""Fields that a class which lacks them ignores: they qualify a computation that the class does not have.

Published configurations carry these fields from the class that the model was trained with.
"""

Choice = TypeVar("Choice", bound=Enum)


class ScheduleFields:
    """Fields of a scheduler configuration. Errors name the class, the field and the value.

    A null field counts as absent. `check_all_read` refuses the fields that no schedule has asked for.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._values = config
        self._class_name = config["_class_name"]
        self._read: set[str] = set()

    def refuse(self, name: str, problem: str) -> ModelError:
        """Return, without raising it, an error about a field: "<class>: <field>: <problem>"."""
        return ModelError(f"{self._class_name}: {name}: {problem}", CODE)

    def _get(self, name: str, default: Any) -> Any:
        """Return the value of a field, of any type; the default if the field is absent or null."""
        self._read.add(name)
        stored = self._values.get(name)
        return default if stored is None else stored

    def is_absent(self, name: str) -> bool:
        """Return whether a field is absent or null."""
        return self._values.get(name) is None

    def read_flag(self, name: str, default: bool = False) -> bool:
        """Return the boolean in a field.

        Raises:
            ModelError: The value is no boolean.
        """
        flag = self._get(name, default)
        if not isinstance(flag, bool):
            raise self.refuse(name, f"{flag!r:.60} is neither true nor false")
        return flag

    def read_count(self, name: str, default: int, lowest: int = 1, most: int = MOST_TIMESTEPS) -> int:
        """Return the integer in a field.

        Raises:
            ModelError: The value is no integer from `lowest` to `most`.
        """
        count = self._get(name, default)
        if isinstance(count, bool) or not isinstance(count, int) or not lowest <= count <= most:
            raise self.refuse(name, f"{count!r:.60} is not a whole number from {lowest} to {most:,}")
        return count

    def read_number(
        self, name: str, default: float, above: float = -math.inf, below: float = math.inf
    ) -> float:
        """Return the finite number in a field.

        Raises:
            ModelError: The value is no number, or not strictly between `above` and `below`.
        """
        number = self._get(name, default)
        if not is_number(number) or not above < number < below:
            limits = "" if above == -math.inf else f" above {above:g}"
            limits += "" if below == math.inf else f" and below {below:g}"
            raise self.refuse(name, f"{number!r:.60} is not a finite number{limits}")
        return float(number)

    def read_lower_limit(self, name: str) -> float:
        """Return the number in a field, which may be negative infinity; negative infinity if absent or null.

        Raises:
            ModelError: The value is no number, or positive infinity.
        """
        limit = self._get(name, -math.inf)
        if limit == -math.inf or is_number(limit):
            return float(limit)
        raise self.refuse(name, f"{limit!r:.60} is neither a finite number nor -Infinity")

    def read_optional_number(self, name: str, above: float, below: float) -> float | None:
        """Return the finite number in a field, or None if the field is absent or null.

        Raises:
            ModelError: The value is no number, or not strictly between `above` and `below`.
        """
        self._read.add(name)
        return None if self.is_absent(name) else self.read_number(name, 0.0, above, below)

    def read_numbers(self, name: str, above: float, below: float) -> np.ndarray | None:
        """Return the list of numbers in a field, float32 [count]; None if the field is absent or null.

        Raises:
            ModelError: The value is no list of numbers strictly between `above` and `below`.
        """
        numbers = self._get(name, None)
        if numbers is None:
            return None
        if not isinstance(numbers, list) or not 1 <= len(numbers) <= MOST_TIMESTEPS:
            raise self.refuse(name, f"{numbers!r:.60} is not a list of 1 to {MOST_TIMESTEPS:,} numbers")
        for index, number in enumerate(numbers):
            if not is_number(number) or not above < number < below:
                raise self.refuse(
                    name, f"{number!r:.60} at index {index} is not between {above:g} and {below:g}"
                )
        return np.array(numbers, np.float32)

    def read_choice(self, name: str, default: Choice) -> Choice:
        """Return the member of the default's enumeration whose value is in a field.

        Raises:
            ModelError: The value is none of the enumeration's.
        """
        choice = self.read_optional_choice(name, type(default))
        return default if choice is None else choice

    def read_optional_choice(self, name: str, choices: type[Choice]) -> Choice | None:
        """Return the member of an enumeration whose value is in a field; None if the field is absent or null.

        Raises:
            ModelError: The value is none of the enumeration's.
        """
        text = self._get(name, None)
        if text is None:
            return None
        members = {member.value: member for member in choices}
        if not isinstance(text, str) or text not in members:
            raise self.refuse(name, f"{text!r:.60} is not supported; use one of {', '.join(members)}")
        return members[text]

    def check_all_read(self) -> None:
        """Check that every field was read, or is one that the class ignores.

        Raises:
            ModelError: A field is unknown, or it asks for a computation that the class does not have.
        """
        for name in self._values:
            if name in self._read or name in _METADATA or name in _INERT:
                continue
            if name not in _SWITCHES:
                raise self.refuse(f"{name:.60}", "unknown field; remove it from the configuration")
            if self._values[name] not in (False, None):
                raise self.refuse(
                    name, f"{self._values[name]!r:.60} asks for what this class does not compute"
                )


def is_number(number: Any) -> bool:
    """Return whether a value of JSON is a finite number; booleans are none."""
    is_numeric = isinstance(number, (int, float)) and not isinstance(number, bool)
    return is_numeric and abs(number) <= float(np.finfo(np.float32).max)
