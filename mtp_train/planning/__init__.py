"""What a run would take before anything is spent: parameters, bytes, memory, hours and money, from sizes alone."""
