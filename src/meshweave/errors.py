"""What a user can cause and mend. Each is a `MeshweaveError`: what is wrong, where, and what would be right."""

from meshweave.base import lazy
from meshweave.base.errors import BindError as BindError
from meshweave.base.errors import CheckpointError as CheckpointError
from meshweave.base.errors import DeadlineError as DeadlineError
from meshweave.base.errors import DescriptionError as DescriptionError
from meshweave.base.errors import LayoutError as LayoutError
from meshweave.base.errors import MeshweaveError as MeshweaveError
from meshweave.base.errors import PlanError as PlanError
from meshweave.base.errors import ProgramError as ProgramError
from meshweave.base.errors import ProofError as ProofError
from meshweave.base.errors import RankLostError as RankLostError
from meshweave.base.errors import UnsupportedError as UnsupportedError

__all__ = lazy.imported_names(__name__)
