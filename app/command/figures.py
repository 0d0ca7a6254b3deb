"""Numbers as people read them."""

_UNITS = ("B", "kB", "MB", "GB", "TB")


def bytes_text(size: float) -> str:
    """1536000 -> "1.5 MB"; decimal units, as disks and models are sold."""
    power = 0
    while size >= 1000 and power < len(_UNITS) - 1:
        size /= 1000
        power += 1
    return f"{size:.0f} {_UNITS[power]}" if power == 0 or size >= 100 else f"{size:.1f} {_UNITS[power]}"


def count_text(count: int) -> str:
    """131072 -> "128k"; below a thousand and unround numbers stay as they are."""
    if count >= 1024 and count % 1024 == 0:
        return f"{count // 1024}k"
    return f"{count:,}" if count else "–"


def share_text(part: float, whole: float) -> str:
    """3 of 4 -> "75 %"."""
    return f"{100 * part / whole:.0f} %" if whole else "–"
