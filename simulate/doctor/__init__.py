"""The command `doctor`: installed software, whether it works and fits together, and the commands that repair it.

`collect` reads the machine once into a `Machine`. Each finding is a function of that record alone.
"""

from simulate.doctor.command import doctor as doctor
