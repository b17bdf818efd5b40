"""The command `doctor`: what is installed, whether it works and fits together, and the commands that mend it.

`collect` reads the machine once into a `Machine`; each finding is a function of that record alone.
"""

from simulate.doctor.command import doctor as doctor
