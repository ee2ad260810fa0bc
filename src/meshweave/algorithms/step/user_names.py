"""What users call the fields of a configuration, in options and reports."""

SHORT_NAMES = {
    "tp": "tensor",
    "pp": "pipeline",
    "dp": "data",
    "cp": "context",
    "vp": "virtual_stages",
    "ep": "expert",
    "etp": "expert_tensor",
}
"""What users call the degrees and the virtual stages, and the attributes of `Parallelism` that have them."""
FIELDS_OF_SPACE = {
    "strategy": "strategies",
    "schedule": "schedules",
    "order": "orders",
    "micro_batch": "micro_batches",
}
"""What users call attributes of `SpaceOptions` of which they give one, and the attributes; see `SHORT_NAMES`."""
