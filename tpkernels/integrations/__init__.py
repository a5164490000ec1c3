"""Our operations under the interfaces of other projects; each module imports its project only when it is imported."""
