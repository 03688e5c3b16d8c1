"""Features of a profile that every engine but selfspec lacks."""

from __future__ import annotations

from selfspec.profile.draft_spec import LayerSkipSpec, LookupSpec
from selfspec.profile.schema import Profile


def common_limitations(profile: Profile) -> list[str]:
    """Return a line for each feature of the profile that no other engine has, such as the controller."""
    spec, lost = profile.draft, []
    controller = getattr(spec, "controller", None)
    if controller is not None and controller.name != "fixed":
        lost.append(f"the controller ({controller.name}): every draft has the same number of tokens")
    if (candidates := getattr(spec, "candidates", 1)) > 1:
        lost.append(f"{candidates} candidates for each position: drafts are single sequences, not trees")
    proposers = getattr(spec, "proposers", None) or ()
    if proposers and not isinstance(spec, LookupSpec):
        kinds = ", ".join(proposer.kind for proposer in proposers)
        lost.append(f"lookup tokens ({kinds}), which save draft steps: every drafted token takes a draft step")
    elif stores := [proposer for proposer in proposers if proposer.kind == "store"]:
        lost.append(f"{len(stores)} store(s) of texts: only prompt and output are looked up")
    if isinstance(spec, LayerSkipSpec):
        if spec.vocabulary is not None:
            lost.append(f"the draft's vocabulary of {len(spec.vocabulary)} tokens: all tokens are drafted")
        if spec.below is not None:
            lost.append(f"the trained head below the path ({spec.below.part})")
        shared = profile.search is not None and profile.search.kv == "shared" and bool(len(spec.path.skip))
        hint = (
            " (the skip set was searched with the model's KV cache; selfspec search --kv own finds one for engines)"
            if shared
            else ""
        )
        lost.append(f"the shared KV cache: a draft model prefills the prompt into a separate KV cache{hint}")
    return [*lost, "the verification rule, seeds and the guard: sampling and its seeds are the engine's own"]
