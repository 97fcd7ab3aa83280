// kv.h: the KV cache: pages of PI_PAGE token positions behind one block table. Sequences share full pages
// after a copy (counted references); a shared page is duplicated before it is written.
#pragma once

#include "config.h"
#include "kernels/kernels.h"

#include <memory>
#include <utility>
#include <vector>

namespace pi {

struct KvShape {
    uint32_t n_layers;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_pages;
    uint32_t n_sequences;
    uint32_t n_context;     // most tokens of one sequence
    uint32_t element_bytes; // 4: float32, 2: float16

    // Bytes of K (or of V) of one head of a page.
    uint64_t half_bytes() const { return uint64_t{head_dim} * PI_PAGE * element_bytes; }
    uint64_t head_bytes() const { return 2 * half_bytes(); }
    uint64_t layer_page_bytes() const { return n_kv_heads * head_bytes(); }
    uint64_t page_bytes() const { return n_layers * layer_page_bytes(); }
};

// The pages of some layers, wherever their memory is.
class KvHome {
  public:
    virtual ~KvHome() = default;
    // Of all its layers: zeros; the bytes of another page.
    virtual void clear(uint32_t page) = 0;
    virtual void copy(uint32_t from, uint32_t to) = 0;
    // layer_page_bytes of one layer.
    virtual void read(uint32_t layer, uint32_t page, uint8_t *out) const = 0;
    virtual void write(uint32_t layer, uint32_t page, const uint8_t *data) = 0;
};

// Reserved address space; its memory is taken page by page as it is touched.
class Reservation {
  public:
    // Throws Error (PI_DOES_NOT_FIT).
    explicit Reservation(uint64_t n_bytes);
    ~Reservation();
    Reservation(const Reservation &) = delete;
    Reservation &operator=(const Reservation &) = delete;

    uint8_t *data() const { return data_; }
    uint64_t n_bytes() const { return n_bytes_; }

  private:
    uint64_t n_bytes_;
    uint8_t *data_;
};

// Pages in the host's memory: those of a layer's head follow each other, since attention reads them so.
class HostPages final : public KvHome {
  public:
    // Reserves room for every page of the layers whose `elsewhere` is 0 (empty: all of them). Throws Error
    // (PI_DOES_NOT_FIT).
    HostPages(const KvShape &shape, const std::vector<uint8_t> &elsewhere);

    void clear(uint32_t page) override;
    void copy(uint32_t from, uint32_t to) override;
    void read(uint32_t layer, uint32_t page, uint8_t *out) const override;
    void write(uint32_t layer, uint32_t page, const uint8_t *data) override;
    // head_bytes
    uint8_t *at(uint32_t layer, uint32_t page, uint32_t kv_head) const;
    uint64_t n_bytes() const { return memory_.n_bytes(); }

  private:
    KvShape shape_;
    std::vector<uint32_t> layers_; // the ones here
    std::vector<uint32_t> place_;  // [n_layers] index among them
    Reservation memory_;
};

class KvCache {
  public:
    // `device`: the home of the layers whose on_device is not 0; null and empty: all layers are the host's.
    // Throws Error (PI_DOES_NOT_FIT).
    explicit KvCache(const KvShape &shape, std::unique_ptr<KvHome> device = nullptr,
                     std::vector<uint8_t> on_device = {});

    const KvShape &shape() const { return shape_; }
    uint64_t n_bytes() const { return uint64_t{shape_.n_pages} * shape_.page_bytes(); }

    uint32_t length(int32_t sequence) const { return table(sequence).length; }
    // Makes room for n more tokens and returns with the length unchanged; Error leaves the sequence as it
    // was.
    void reserve(int32_t sequence, uint32_t n);
    // The n tokens after the current length have been stored.
    void advance(int32_t sequence, uint32_t n);
    // Keeps the first n_tokens and gives the other pages back.
    void truncate(int32_t sequence, uint32_t n_tokens);
    void copy(int32_t from, int32_t to);

    // Bytes of one head of a layer of the host's: K [head_dim, PI_PAGE], then V [PI_PAGE, head_dim].
    uint8_t *head(uint32_t layer, uint32_t page, uint32_t kv_head) const;
    uint32_t page_of(int32_t sequence, uint32_t position) const {
        return table(sequence).pages[position / PI_PAGE];
    }

    uint64_t saved_bytes(int32_t sequence) const;
    void save(int32_t sequence, uint8_t *out) const;
    // Replaces the sequence; throws Error when the bytes are not of this shape.
    void load(int32_t sequence, const uint8_t *data, uint64_t n_bytes);

  private:
    struct Table {
        uint32_t length = 0;
        std::vector<uint32_t> pages;
    };
    const Table &table(int32_t sequence) const;
    Table &table(int32_t sequence) { return const_cast<Table &>(std::as_const(*this).table(sequence)); }
    [[noreturn]] void throw_full() const;
    // Throws Error unless n pages could replace those of the sequence.
    void require_pages(int32_t sequence, uint32_t n) const;
    uint32_t take_page();
    void drop_page(uint32_t page);
    void make_writable(Table &table, size_t index);
    KvHome &home(uint32_t layer) const;

    KvShape shape_;
    std::unique_ptr<HostPages> host_; // first: what does not fit is refused before any list of pages is made
    std::unique_ptr<KvHome> device_;
    std::vector<uint8_t> on_device_; // [n_layers] or empty
    std::vector<Table> tables_;
    std::vector<uint32_t> references_; // per page
    std::vector<uint32_t> free_pages_;
};

} // namespace pi
