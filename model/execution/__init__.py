"""A network on a device: launch list, bound launches, pipeline stages, arrays of ranks."""
