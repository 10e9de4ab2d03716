/* Memory: counted device memory, pinned host memory, expandable segments, copies. Included by runtime.c. */

enum kind { DEVICE, HOST, MAPPED };
struct block {
    char *start;
    size_t size;
    int32_t device;
    enum kind kind;
};

static pthread_mutex_t memory = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks;
static size_t block_count, block_room;

/* The index of the first block that starts after p. */
static size_t after(const char *p)
{
    size_t low = 0, high = block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (blocks[middle].start > p)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

static int add_block(void *start, size_t size, enum kind kind, int32_t device)
{
    if (block_count == block_room) {
        size_t room = block_room ? block_room * 2 : 256;
        struct block *grown = realloc(blocks, room * sizeof *blocks);
        if (!grown)
            return 0;
        blocks = grown;
        block_room = room;
    }
    size_t at = after(start);
    memmove(blocks + at + 1, blocks + at, (block_count - at) * sizeof *blocks);
    blocks[at] = (struct block){start, size, device, kind};
    block_count++;
    return 1;
}

static int take_block(void *start, struct block *taken)
{
    size_t at = after(start);
    if (!at || blocks[at - 1].start != (char *)start)
        return 0;
    *taken = blocks[--at];
    memmove(blocks + at, blocks + at + 1, (block_count - at - 1) * sizeof *blocks);
    block_count--;
    return 1;
}

/* 1 if the whole range lies in device memory of this process. */
int simulator_is_live(const char *start, uint64_t size)
{
    pthread_mutex_lock(&memory);
    int live = 0;
    while (1) {
        size_t at = after(start);
        if (!at)
            break;
        struct block *block = &blocks[at - 1];
        if (block->kind == HOST || start >= block->start + block->size)
            break;
        uint64_t here = (uint64_t)(block->start + block->size - start);
        if (here >= size) {
            live = 1;
            break;
        }
        start += here; /* expandable segments: a tensor may span mappings */
        size -= here;
    }
    pthread_mutex_unlock(&memory);
    return live;
}

static aclError account(size_t size)
{
    if (used[current] + reserved[current] + size > capacity) {
        snprintf(messages[current], MESSAGE, "simulated device %d: %zu bytes requested, %zu of %zu in use", current, size,
                 used[current] + reserved[current], capacity);
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    }
    used[current] += size;
    if (used[current] > peak[current])
        peak[current] = used[current];
    return 0;
}

static aclError take_memory(void **out, size_t size)
{
    if (health())
        return health();
    size = (size + 511) / 512 * 512;
    if (!size)
        size = 512;
    pthread_mutex_lock(&memory);
    aclError error = account(size);
    if (!error) {
        void *start =
            mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED || !add_block(start, size, DEVICE, current)) {
            if (start != MAP_FAILED)
                munmap(start, size);
            used[current] -= size;
            error = ACL_ERROR_RT_MEMORY_ALLOCATION;
        } else
            *out = start;
    }
    pthread_mutex_unlock(&memory);
    return error;
}

aclError aclrtMalloc(void **out, size_t size, aclrtMemMallocPolicy policy) { return take_memory(out, size); }
aclError aclrtMallocAlign32(void **out, size_t size, aclrtMemMallocPolicy policy) { return take_memory(out, size); }
aclError aclrtMallocWithCfg(void **out, size_t size, aclrtMemMallocPolicy policy, aclrtMallocConfig *config)
{
    return take_memory(out, size);
}

aclError aclrtFree(void *start)
{
    struct block block;
    pthread_mutex_lock(&memory);
    int found = take_block(start, &block);
    if (found) {
        munmap(block.start, block.size);
        used[block.device] -= block.size;
    }
    pthread_mutex_unlock(&memory);
    return found ? 0 : ACL_ERROR_RT_PARAM_INVALID;
}

static aclError take_host(void **out, size_t size)
{
    if (posix_memalign(out, 4096, size ? size : 1))
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&memory);
    int added = add_block(*out, size ? size : 1, HOST, current);
    pthread_mutex_unlock(&memory);
    if (!added)
        free(*out);
    return added ? 0 : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtMallocHost(void **out, size_t size) { return take_host(out, size); }
aclError aclrtMallocHostWithCfg(void **out, uint64_t size, aclrtMallocConfig *config) { return take_host(out, size); }

aclError aclrtFreeHost(void *start)
{
    struct block block;
    pthread_mutex_lock(&memory);
    int found = take_block(start, &block);
    pthread_mutex_unlock(&memory);
    if (!found)
        return ACL_ERROR_RT_PARAM_INVALID;
    free(start);
    return 0;
}

aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes)
{
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    pthread_mutex_lock(&memory);
    size_t at = after(pointer);
    if (at && (char *)pointer < blocks[at - 1].start + blocks[at - 1].size) {
        attributes->location.id = (uint32_t)blocks[at - 1].device;
        attributes->location.type =
            blocks[at - 1].kind == HOST ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_DEVICE;
    }
    pthread_mutex_unlock(&memory);
    return 0;
}

aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *available, size_t *total)
{
    size_t taken = used[current] + reserved[current];
    *available = taken < capacity ? capacity - taken : 0;
    *total = capacity;
    return 0;
}

/* Expandable segments: addresses are reserved, physical memory is allocated and mapped to them. */
struct physical {
    size_t size;
    int32_t device;
};

aclError aclrtReserveMemAddress(void **out, size_t size, size_t alignment, void *expected, uint64_t flags)
{
    void *start = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    *out = start;
    return 0;
}

aclError aclrtReleaseMemAddress(void *start) { return 0; } /* the addresses are not used again */

aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *wanted, uint64_t flags)
{
    if (health())
        return health();
    pthread_mutex_lock(&memory);
    aclError error = account(size);
    pthread_mutex_unlock(&memory);
    if (error)
        return error;
    struct physical *physical = malloc(sizeof *physical);
    *physical = (struct physical){size, current};
    *handle = (aclrtDrvMemHandle)physical;
    return 0;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle)
{
    struct physical *physical = (struct physical *)handle;
    pthread_mutex_lock(&memory);
    used[physical->device] -= physical->size;
    pthread_mutex_unlock(&memory);
    free(physical);
    return 0;
}

aclError aclrtMapMem(void *start, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags)
{
    struct physical *physical = (struct physical *)handle;
    if (mprotect(start, size, PROT_READ | PROT_WRITE))
        return ACL_ERROR_RT_MEMORY_ALLOCATION;
    pthread_mutex_lock(&memory);
    int added = add_block(start, size, MAPPED, physical->device);
    pthread_mutex_unlock(&memory);
    return added ? 0 : ACL_ERROR_RT_MEMORY_ALLOCATION;
}

aclError aclrtUnmapMem(void *start)
{
    struct block block;
    pthread_mutex_lock(&memory);
    int found = take_block(start, &block);
    pthread_mutex_unlock(&memory);
    if (!found)
        return ACL_ERROR_RT_PARAM_INVALID;
    madvise(start, block.size, MADV_DONTNEED);
    mprotect(start, block.size, PROT_NONE);
    return 0;
}

static aclError transfer(aclrtMemcpyKind kind, void *stream)
{
    if (health())
        return health();
    if (simulator_attention)
        return host_call(HOST_CALL_TRANSFER, (void *)(intptr_t)kind, stream, NULL);
    return 0;
}

aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind)
{
    aclError error = transfer(kind, NULL);
    if (error)
        return error;
    if (size > room)
        return ACL_ERROR_RT_PARAM_INVALID;
    memmove(to, from, size);
    return 0;
}

aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream)
{
    aclError error = transfer(kind, stream);
    if (error)
        return error;
    if (size > room)
        return ACL_ERROR_RT_PARAM_INVALID;
    memmove(to, from, size);
    return 0;
}

aclError aclrtMemset(void *start, size_t room, int32_t value, size_t size)
{
    if (health())
        return health();
    memset(start, value, size);
    return 0;
}

aclError aclrtMemsetAsync(void *start, size_t room, int32_t value, size_t size, aclrtStream stream)
{
    return aclrtMemset(start, room, value, size);
}
