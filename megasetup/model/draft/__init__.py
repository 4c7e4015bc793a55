"""Eagle-3 draft models that are trained beside the policy. See docs/draft.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megasetup.model.draft.attach import create_draft_pre_wrap_hook
from megasetup.model.draft.capture import CapturedStates, capture_hidden_states
from megasetup.model.draft.files import DraftWeightsError
from megasetup.model.draft.parts import get_attached_draft_model

if TYPE_CHECKING:
    from megasetup.model.draft.eagle import DraftOutput, EagleDraft
    from megasetup.model.draft.weights import export_draft

__all__ = [
    "CapturedStates",
    "DraftOutput",
    "DraftWeightsError",
    "EagleDraft",
    "capture_hidden_states",
    "create_draft_pre_wrap_hook",
    "export_draft",
    "get_attached_draft_model",
]


def __getattr__(name: str) -> Any:
    # These import ModelOpt, which only a policy with a draft needs.
    if name in ("DraftOutput", "EagleDraft"):
        from megasetup.model.draft import eagle

        return getattr(eagle, name)
    if name == "export_draft":
        from megasetup.model.draft.weights import export_draft

        return export_draft
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
