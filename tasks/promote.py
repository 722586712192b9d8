"""Stage: the alias champion goes to the new version when its score allows."""

from tasks.registry import CHAMPION, decide
from tasks.session import current_session
from tasks.stage import stage


@stage("promote", "version {0}")
def promote(version: str) -> bool:
    """Decides against the present champion; returns whether the version is champion now."""
    session = current_session()
    registry, settings = session.registry, session.config.registry
    if not settings.promote:
        session.console.note("registry.promote is off")
        return False
    present = registry.aliases().get(CHAMPION)
    champion = registry.get(present) if present else None
    promoted, reason = decide(registry.get(version), champion, settings.min_score)
    if promoted:
        registry.promote(version)
    session.console.note(("promoted: " if promoted else "not promoted: ") + reason)
    return promoted
