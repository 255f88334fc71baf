"""An adapter to copy from, nothing of ours in it: whole pages of one layout, `page_first_direct`, by slices in NumPy.

python -m verify adapter pages
"""

# pyright: basic

versions = {"pages": "1.0"}  # optional, for reports


def capabilities(geometry, layout, direction):
    """None where it is offered, else why not."""
    if layout != "page_first_direct" or direction.endswith("entries"):
        return "only whole pages in page_first_direct"


def transfer(geometry, layout, direction, host, device, host_indices, device_indices, layers):
    """`host` and `device` are arrays of bytes by name; geometry["host"] and ["device"] tell what they hold."""
    host_pages = pages_of(geometry, "host", host_indices, direction == "backup")
    device_pages = pages_of(geometry, "device", device_indices, direction == "load")
    if len(host_pages) != len(device_pages):
        raise ValueError("lists of unequal length")
    for buffer in geometry["host"]:  # its bytes are [page, layer, the rest], those of a device buffer [page, the rest]
        rows = host[buffer["name"]].reshape(geometry["host_pages"], len(buffer["layers"]), -1)
        for position, layer in enumerate(buffer["layers"]):
            if layers is not None and layer not in layers:
                continue  # a load of other layers
            device_rows = device[device_name(geometry, buffer, layer)].reshape(geometry["device_pages"], -1)
            for a, b in zip(host_pages, device_pages, strict=True):
                if direction == "backup":
                    rows[a, position] = device_rows[b]
                else:
                    device_rows[b] = rows[a, position]


def pages_of(geometry, side, indices, is_destination):
    """Page numbers of a list that has `page_size` indices for each page. Refused before a byte moves."""
    size, indices = geometry["page_size"], indices.tolist()
    pages = [first // size for first in indices[::size]]
    if indices != [page * size + i for page in pages for i in range(size)]:
        raise ValueError(f"no whole pages on the {side}")
    if any(not 0 <= page < geometry[f"{side}_pages"] for page in pages):
        raise ValueError(f"beyond the {side} pool")
    if is_destination and len(set(pages)) < len(pages):
        raise ValueError("a page would be written twice")
    return pages


def device_name(geometry, buffer, layer):
    """The device buffer of this layer with the same components."""
    same = (buffer["components"], [layer])
    return next(b["name"] for b in geometry["device"] if (b["components"], b["layers"]) == same)
