"""Files of images that rows name, on this machine or in an object store."""

from __future__ import annotations

from prefillcli.errors import brief, out_of_resource, without_secrets
from prefillcli.images.image import ImageError
from prefillcli.images.reading import MAX_BYTES, read_below
from prefillcli.rows.filesystems import Failure, filesystem_of, is_local, patiently, reading


def read_image_file(root: str, path: str) -> bytes:
    """Return the content of a file below a local folder or URL, as `read_images` wants it of a `read_file`.

    Raises ImageError for a file that there is not or that cannot be read, and PrefillError where the store is out of
    reach or refuses: that is no fault of the row.
    """
    with reading(root):
        filesystem, inner = filesystem_of(root)
    if is_local(filesystem):
        return read_below(inner, path)
    place = f"{inner.rstrip('/')}/{path}"  # of a path in a URL, `::file://` would name another store
    try:
        found: bytes = patiently(lambda: filesystem.cat_file(place, end=MAX_BYTES + 1))
    except Exception as error:
        if out_of_resource(error) or Failure.of(error) in (Failure.PASSING, Failure.REFUSED):
            with reading(root):
                raise
        reason = "no such file" if Failure.of(error) is Failure.MISSING else without_secrets(brief(error))
        raise ImageError(f"{path[:150]!a}: {reason}") from None
    return found
