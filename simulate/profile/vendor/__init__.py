"""Device profiles of the vendor's profilers, read and compared with a prediction: `time --against PROFILE`."""

from simulate.profile.vendor.read import read_profile
from simulate.profile.vendor.records import DeviceProfile
from simulate.profile.vendor.side_by_side import SideBySide, side_by_side

__all__ = ["DeviceProfile", "SideBySide", "read_profile", "side_by_side"]
