/* Transfers in C, to be checked without Python: whole pages of `page_first_direct`. Compiled into check_vectors.c:
 *
 *     cc -O2 -DMOVER='"my_move.c"' check_vectors.c -o check_mine && ./check_mine data/vectors/mha.txt ... */

static int64_t device_buffer(const Group *g, int64_t component, int64_t layer) {
    int64_t i = 0;
    while (g->buffer[DEVICE][i].components.at[0] != component || g->buffer[DEVICE][i].layers.at[0] != layer) i++;
    return i;
}

static int move(const Group *g, Case *t, uint8_t **bytes[2]) {
    if (g->layout != PAGE_FIRST_DIRECT || t->unit == ENTRIES) return UNSUPPORTED;
    int reason = refused(g, t);
    if (reason) return reason;
    for (int64_t i = 0; i < g->buffers[HOST]; i++) {
        const Buffer *b = &g->buffer[HOST][i];
        int64_t layers = b->layers.n, each = b->bytes / g->pages[HOST] / layers; /* one layer of a page */
        for (int64_t at = 0; at < layers; at++) {
            int64_t layer = b->layers.at[at];
            if (t->layers.n >= 0 && position(&t->layers, layer) < 0) continue;
            uint8_t *there = bytes[HOST][i] + at * each;
            uint8_t *here = bytes[DEVICE][device_buffer(g, b->components.at[0], layer)];
            for (int64_t k = 0; k < t->items[HOST].n; k++) {
                uint8_t *host = there + t->items[HOST].at[k] * layers * each;
                uint8_t *device = here + t->items[DEVICE].at[k] * each;
                if (destination(t) == HOST) memcpy(host, device, each);
                else memcpy(device, host, each);
            }
        }
    }
    return 0;
}
