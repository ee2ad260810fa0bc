"""What a user can cause and mend. Each is a `MeshweaveError`: what is wrong, where, and what would be right."""

from meshweave.base.errors import (
    BindError,
    CheckpointError,
    DeadlineError,
    DescriptionError,
    LayoutError,
    MeshweaveError,
    PlanError,
    ProgramError,
    ProofError,
    RankLostError,
    UnsupportedError,
)

__all__ = [
    "BindError",
    "CheckpointError",
    "DeadlineError",
    "DescriptionError",
    "LayoutError",
    "MeshweaveError",
    "PlanError",
    "ProgramError",
    "ProofError",
    "RankLostError",
    "UnsupportedError",
]
