/* Transfers in C, to be checked through ctypes (pages_in_c.py): rows of `layer_first`, page by page.
 *
 *     cc -O2 -shared -fPIC mover.c -o mover.so && python -m verify adapter pages_in_c */

#include <stdint.h>
#include <string.h>

/* 0, or why one list of indices must be refused. `once`: every page is written, so it must not come twice. */
static int refused(const int64_t *list, int64_t n, int64_t page_size, int64_t pages, int once) {
    if (n % page_size) return 1;
    for (int64_t i = 0; i < n; i++) {
        int64_t first = list[i / page_size * page_size];
        if (first % page_size || list[i] != first + i % page_size) return 2;
        if (list[i] < 0 || list[i] / page_size >= pages) return 3;
        for (int64_t k = 0; once && k < i; k++)
            if (list[k] == list[i]) return 4;
    }
    return 0;
}

/* Both lists, before a byte moves. */
int check(const int64_t *to, int64_t n, int64_t to_pages, const int64_t *from, int64_t m, int64_t from_pages,
          int64_t page_size) {
    if (n != m) return 5;
    int reason = refused(to, n, page_size, to_pages, 1);
    return reason ? reason : refused(from, n, page_size, from_pages, 0);
}

/* One layer of one component: `bytes` a page, pages one after the other on both sides. */
void move(uint8_t *to, const int64_t *to_list, const uint8_t *from, const int64_t *from_list, int64_t n,
          int64_t page_size, int64_t bytes) {
    for (int64_t i = 0; i < n; i += page_size)
        memcpy(to + to_list[i] / page_size * bytes, from + from_list[i] / page_size * bytes, bytes);
}
