#include "kv.h"

#include "status.h"

#include <cstring>
#include <sys/mman.h>

namespace pi {
namespace {

constexpr uint32_t saved_magic = 0x31564b50; // "PKV1"

// Opens a saved sequence; followed by the pages' bytes.
struct SavedHeader {
    uint32_t magic;
    uint32_t n_layers;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t element_bytes;
    uint32_t n_tokens;
};

// Of n_layers layers.
uint64_t total_bytes(const KvShape &shape, uint64_t n_layers) {
    uint64_t n_bytes = 0;
    if (__builtin_mul_overflow(shape.layer_page_bytes() * n_layers, uint64_t{shape.n_pages}, &n_bytes) ||
        n_bytes > INT64_MAX)
        throw Error(PI_DOES_NOT_FIT, "the KV cache is larger than the address space", "lower -c");
    return n_bytes;
}

std::vector<uint32_t> layers_here(const KvShape &shape, const std::vector<uint8_t> &elsewhere) {
    std::vector<uint32_t> layers;
    for (uint32_t layer = 0; layer < shape.n_layers; ++layer) {
        if (elsewhere.empty() || elsewhere[layer] == 0)
            layers.push_back(layer);
    }
    return layers;
}

uint32_t pages_for(uint32_t n_tokens) {
    return (n_tokens + PI_PAGE - 1) / PI_PAGE;
}

} // namespace

Reservation::Reservation(uint64_t n_bytes) : n_bytes_(n_bytes), data_(nullptr) {
    if (n_bytes == 0)
        return;
    void *address = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (address == MAP_FAILED)
        throw Error(PI_DOES_NOT_FIT, "the KV cache of " + std::to_string(n_bytes) + " bytes does not fit",
                    "lower -c or the number of sequences");
    data_ = static_cast<uint8_t *>(address);
}

Reservation::~Reservation() {
    if (data_ != nullptr)
        munmap(data_, n_bytes_);
}

HostPages::HostPages(const KvShape &shape, const std::vector<uint8_t> &elsewhere)
    : shape_(shape), layers_(layers_here(shape, elsewhere)), place_(shape.n_layers),
      memory_(total_bytes(shape, layers_.size())) {
    for (uint32_t i = 0; i < layers_.size(); ++i)
        place_[layers_[i]] = i;
}

uint8_t *HostPages::at(uint32_t layer, uint32_t page, uint32_t kv_head) const {
    const uint64_t first = (uint64_t{place_[layer]} * shape_.n_kv_heads + kv_head) * shape_.n_pages;
    return memory_.data() + (first + page) * shape_.head_bytes();
}

void HostPages::clear(uint32_t page) {
    for (const uint32_t layer : layers_) {
        for (uint32_t head = 0; head < shape_.n_kv_heads; ++head)
            std::memset(at(layer, page, head), 0, shape_.head_bytes());
    }
}

void HostPages::copy(uint32_t from, uint32_t to) {
    for (const uint32_t layer : layers_) {
        for (uint32_t head = 0; head < shape_.n_kv_heads; ++head)
            std::memcpy(at(layer, to, head), at(layer, from, head), shape_.head_bytes());
    }
}

void HostPages::read(uint32_t layer, uint32_t page, uint8_t *out) const {
    for (uint32_t head = 0; head < shape_.n_kv_heads; ++head, out += shape_.head_bytes())
        std::memcpy(out, at(layer, page, head), shape_.head_bytes());
}

void HostPages::write(uint32_t layer, uint32_t page, const uint8_t *data) {
    for (uint32_t head = 0; head < shape_.n_kv_heads; ++head, data += shape_.head_bytes())
        std::memcpy(at(layer, page, head), data, shape_.head_bytes());
}

KvCache::KvCache(const KvShape &shape, std::unique_ptr<KvHome> device, std::vector<uint8_t> on_device)
    : shape_(shape), host_(std::make_unique<HostPages>(shape, on_device)), device_(std::move(device)),
      on_device_(std::move(on_device)), tables_(shape.n_sequences), references_(shape.n_pages, 0) {
    free_pages_.reserve(shape.n_pages);
    for (uint32_t page = shape.n_pages; page > 0; --page)
        free_pages_.push_back(page - 1);
}

const KvCache::Table &KvCache::table(int32_t sequence) const {
    if (sequence < 0 || static_cast<size_t>(sequence) >= tables_.size())
        throw_usage("sequence " + std::to_string(sequence) + " is not below " +
                    std::to_string(tables_.size()));
    return tables_[static_cast<size_t>(sequence)];
}

uint8_t *KvCache::head(uint32_t layer, uint32_t page, uint32_t kv_head) const {
    return host_->at(layer, page, kv_head);
}

KvHome &KvCache::home(uint32_t layer) const {
    return on_device_.empty() || on_device_[layer] == 0 ? static_cast<KvHome &>(*host_) : *device_;
}

void KvCache::throw_full() const {
    throw Error(PI_FAILURE,
                "the KV cache is full: all " + std::to_string(uint64_t{shape_.n_pages} * PI_PAGE) +
                    " positions are in use",
                "raise -c, or end a sequence");
}

void KvCache::require_pages(int32_t sequence, uint32_t n) const {
    size_t available = free_pages_.size();
    for (const uint32_t page : table(sequence).pages)
        available += references_[page] == 1 ? 1 : 0;
    if (n > available)
        throw_full();
}

uint32_t KvCache::take_page() {
    if (free_pages_.empty())
        throw_full();
    const uint32_t page = free_pages_.back();
    free_pages_.pop_back();
    references_[page] = 1;
    // Positions that are not visible still meet a weight of 0, and 0 times a stale infinity is no 0.
    host_->clear(page);
    if (device_ != nullptr)
        device_->clear(page);
    return page;
}

void KvCache::drop_page(uint32_t page) {
    if (--references_[page] == 0)
        free_pages_.push_back(page);
}

void KvCache::make_writable(Table &table, size_t index) {
    const uint32_t shared = table.pages[index];
    if (references_[shared] == 1)
        return;
    const uint32_t own = take_page();
    host_->copy(shared, own);
    if (device_ != nullptr)
        device_->copy(shared, own);
    drop_page(shared);
    table.pages[index] = own;
}

void KvCache::reserve(int32_t sequence, uint32_t n) {
    Table &sequence_table = table(sequence);
    const uint32_t before = sequence_table.length;
    if (n > shape_.n_context - before)
        throw Error(PI_FAILURE,
                    "sequence " + std::to_string(sequence) + " would grow from " + std::to_string(before) +
                        " to " + std::to_string(uint64_t{before} + n) + " tokens, beyond the context of " +
                        std::to_string(shape_.n_context),
                    "raise -c or shorten the prompt");
    try {
        if (before % PI_PAGE != 0)
            make_writable(sequence_table, before / PI_PAGE);
        while (sequence_table.pages.size() < pages_for(before + n))
            sequence_table.pages.push_back(take_page());
    } catch (...) {
        truncate(sequence, before);
        throw;
    }
}

void KvCache::advance(int32_t sequence, uint32_t n) {
    table(sequence).length += n;
}

void KvCache::truncate(int32_t sequence, uint32_t n_tokens) {
    Table &sequence_table = table(sequence);
    if (n_tokens > sequence_table.length)
        throw_usage("sequence " + std::to_string(sequence) + " has only " +
                    std::to_string(sequence_table.length) + " tokens");
    while (sequence_table.pages.size() > pages_for(n_tokens)) {
        drop_page(sequence_table.pages.back());
        sequence_table.pages.pop_back();
    }
    sequence_table.length = n_tokens;
}

void KvCache::copy(int32_t from, int32_t to) {
    const Table &source = table(from);
    if (from == to)
        return;
    truncate(to, 0);
    Table &target = table(to);
    target = source;
    for (const uint32_t page : target.pages)
        ++references_[page];
}

uint64_t KvCache::saved_bytes(int32_t sequence) const {
    return sizeof(SavedHeader) + pages_for(length(sequence)) * shape_.page_bytes();
}

void KvCache::save(int32_t sequence, uint8_t *out) const {
    const SavedHeader header{saved_magic,     shape_.n_layers,      shape_.n_kv_heads,
                             shape_.head_dim, shape_.element_bytes, length(sequence)};
    std::memcpy(out, &header, sizeof(header));
    out += sizeof(header);
    for (uint32_t index = 0; index < pages_for(header.n_tokens); ++index) {
        for (uint32_t layer = 0; layer < shape_.n_layers; ++layer) {
            home(layer).read(layer, table(sequence).pages[index], out);
            out += shape_.layer_page_bytes();
        }
    }
}

void KvCache::load(int32_t sequence, const uint8_t *data, uint64_t n_bytes) {
    SavedHeader header{};
    if (n_bytes < sizeof(header))
        throw_usage("a saved sequence is shorter than its header");
    std::memcpy(&header, data, sizeof(header));
    if (header.magic != saved_magic || header.n_layers != shape_.n_layers ||
        header.n_kv_heads != shape_.n_kv_heads || header.head_dim != shape_.head_dim ||
        header.element_bytes != shape_.element_bytes)
        throw_usage("the saved sequence is of another model or KV type");
    if (header.n_tokens > shape_.n_context ||
        n_bytes != sizeof(header) + pages_for(header.n_tokens) * shape_.page_bytes())
        throw_usage("the saved sequence has a wrong length");
    require_pages(sequence, pages_for(header.n_tokens)); // before anything is lost
    truncate(sequence, 0);
    reserve(sequence, header.n_tokens);
    data += sizeof(header);
    for (uint32_t index = 0; index < pages_for(header.n_tokens); ++index) {
        for (uint32_t layer = 0; layer < shape_.n_layers; ++layer) {
            home(layer).write(layer, table(sequence).pages[index], data);
            data += shape_.layer_page_bytes();
        }
    }
    advance(sequence, header.n_tokens);
}

} // namespace pi
