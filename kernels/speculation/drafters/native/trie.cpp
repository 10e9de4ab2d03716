// The n-gram trie of kernels/speculation/drafters/trie.py and the drafts of ngram.py, which document the algorithms: the
// same nodes are created, dropped and drafted. A separate library, for any processor.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <queue>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace {

constexpr int kWide = 8;  // children up to which they are searched linearly

struct Node {
    int32_t token = 0, count = 0;
    int32_t first = 0;                 // the child seen last; -1 - t if they are in table t
    int32_t after = 0, before = 0;     // siblings seen before and after this one
};

struct Table {
    int32_t first = 0;
    std::unordered_map<int32_t, int32_t> places;  // of children, by token
};

using Roots = std::unordered_map<int32_t, int32_t>;

// Node 0 means none.
struct Generation {
    int64_t number;
    std::vector<Node> nodes;
    std::vector<Table> tables;
    std::unordered_map<int64_t, Roots> roots;  // by salt

    Generation(int64_t number, int64_t max_nodes) : number(number), nodes(1) {
        try {
            nodes.reserve(max_nodes + 1);  // the system allocates it as it is written
        } catch (...) {
        }
    }

    int64_t size() const { return static_cast<int64_t>(nodes.size()) - 1; }

    int32_t first(int32_t node) const {
        const int32_t head = nodes[node].first;
        return head < 0 ? tables[-1 - head].first : head;
    }

    int32_t child(int32_t node, int32_t token) const {
        int32_t at = nodes[node].first;
        if (at < 0) {
            const auto& places = tables[-1 - at].places;
            const auto found = places.find(token);
            return found == places.end() ? 0 : found->second;
        }
        while (at && nodes[at].token != token) at = nodes[at].after;
        return at;
    }

    int32_t make(int32_t token) {
        nodes.push_back(Node{token, 1});
        return static_cast<int32_t>(nodes.size()) - 1;
    }

    int32_t see_root(Roots& root, int32_t token) {
        const auto [found, fresh] = root.try_emplace(token, 0);
        if (fresh)
            found->second = make(token);
        else
            ++nodes[found->second].count;
        return found->second;
    }

    int32_t see(int32_t node, int32_t token) {
        const int32_t head = nodes[node].first;
        int32_t found = 0, width = 0;
        if (head < 0) {
            found = child(node, token);
        } else {
            found = head;
            while (found && nodes[found].token != token) {
                found = nodes[found].after;
                ++width;
            }
        }
        const int32_t leading = head < 0 ? tables[-1 - head].first : head;
        if (found) {
            ++nodes[found].count;
            if (found == leading) return found;
            Node& seen = nodes[found];
            nodes[seen.before].after = seen.after;
            if (seen.after) nodes[seen.after].before = seen.before;
        } else {
            found = make(token);
            if (head >= 0 && width == kWide) {
                Table& table = tables.emplace_back();
                for (int32_t at = head; at; at = nodes[at].after) table.places.emplace(nodes[at].token, at);
                nodes[node].first = -static_cast<int32_t>(tables.size());
            }
            if (nodes[node].first < 0) tables[-1 - nodes[node].first].places.emplace(token, found);
        }
        nodes[found].after = leading;
        nodes[found].before = 0;
        if (leading) nodes[leading].before = found;
        if (nodes[node].first < 0)
            tables[-1 - nodes[node].first].first = found;
        else
            nodes[node].first = found;
        return found;
    }
};

struct Sequence {
    int64_t salt, generation;
    std::vector<int32_t> young, old;
};

struct Settings {
    int64_t min_match, max_match, min_breadth, max_breadth, by_probability;
};

struct Trie {
    int64_t half, depth;
    std::unique_ptr<Generation> young, old;
    std::unordered_set<Sequence*> sequences;
    std::vector<int32_t> scratch;

    Trie(int64_t half, int64_t depth)
        : half(half),
          depth(depth),
          young(std::make_unique<Generation>(0, half)),
          old(std::make_unique<Generation>(-1, 0)) {}
    ~Trie() {
        for (Sequence* each : sequences) delete each;
    }

    void follow(Sequence& sequence) {
        const int64_t turns = young->number - sequence.generation;
        if (!turns) return;
        sequence.old.clear();
        if (turns == 1) sequence.old.swap(sequence.young);
        sequence.young.clear();
        sequence.generation = young->number;
    }

    void extend(Sequence& sequence, const int32_t* tokens, int64_t count) {
        follow(sequence);
        for (int64_t at = 0; at < count; ++at) {
            if (young->size() + depth > half) {
                auto fresh = std::make_unique<Generation>(young->number + 1, half);
                old = std::move(young);
                young = std::move(fresh);
                follow(sequence);
            }
            const int32_t token = tokens[at];
            scratch.clear();
            scratch.push_back(young->see_root(young->roots[sequence.salt], token));
            for (const int32_t node : sequence.young) {
                if (static_cast<int64_t>(scratch.size()) == depth) break;
                scratch.push_back(young->see(node, token));
            }
            sequence.young.swap(scratch);
            const auto known = old->roots.find(sequence.salt);
            if (known == old->roots.end()) continue;
            const auto root = known->second.find(token);
            scratch.clear();
            scratch.push_back(root == known->second.end() ? 0 : root->second);
            for (const int32_t node : sequence.old) {
                if (static_cast<int64_t>(scratch.size()) == depth) break;
                scratch.push_back(node ? old->child(node, token) : 0);
            }
            while (!scratch.empty() && !scratch.back()) scratch.pop_back();
            sequence.old.swap(scratch);
        }
    }
};

// A tree of draft tokens; its arrays have room for ``max_nodes`` nodes.
struct Tree {
    int32_t *tokens, *parents, *windows;
    int64_t max_nodes, count = 1;
    int32_t window = 0;

    bool full() const { return count >= max_nodes; }

    int32_t place(int32_t parent, int32_t token) {
        for (int64_t at = parent + 1; at < count; ++at)
            if (parents[at] == parent && tokens[at] == token) return static_cast<int32_t>(at);
        if (full()) return -1;
        tokens[count] = token, parents[count] = parent, windows[count] = window;
        return static_cast<int32_t>(count++);
    }
};

void breadth_first(Tree& tree, const Generation& generation, int32_t node, int64_t breadth, int64_t min_breadth) {
    std::vector<std::pair<int32_t, int32_t>> level{{0, node}}, below;
    while (!level.empty()) {
        below.clear();
        for (const auto& [parent, seen] : level) {
            int32_t child = generation.first(seen);
            for (int64_t number = 0; child && number < breadth; ++number, child = generation.nodes[child].after) {
                const int32_t place = tree.place(parent, generation.nodes[child].token);
                if (place < 0) return;
                below.emplace_back(place, child);
            }
        }
        level.swap(below);
        breadth = std::max(min_breadth, breadth / 2);
    }
}

void grow_by_probability(Tree& tree, const Generation& generation, int32_t node, int64_t max_breadth) {
    using Waiting = std::tuple<double, int64_t, int32_t, int32_t>;  // as in ngram.py
    std::priority_queue<Waiting, std::vector<Waiting>, std::greater<>> waiting;
    int64_t order = 0;
    const auto expand = [&](int32_t place, int32_t seen, double probability) {
        int64_t total = 0, number = 0;
        for (int32_t at = generation.first(seen); at && number < max_breadth; at = generation.nodes[at].after, ++number)
            total += generation.nodes[at].count;
        number = 0;
        for (int32_t at = generation.first(seen); at && number < max_breadth; at = generation.nodes[at].after, ++number)
            waiting.emplace(-probability * generation.nodes[at].count / static_cast<double>(total), ++order, place, at);
    };
    expand(0, node, 1.0);
    while (!waiting.empty()) {
        const auto [negative, _, parent, child] = waiting.top();
        waiting.pop();
        const int32_t place = tree.place(parent, generation.nodes[child].token);
        if (place < 0) return;
        expand(place, child, -negative);
    }
}

void draft_tree(Trie& trie, Sequence& sequence, const Settings& settings, Tree& tree) {
    trie.follow(sequence);
    const int64_t max_match = std::min(settings.max_match, trie.depth - 1);
    const auto known = static_cast<int64_t>(std::max(sequence.young.size(), sequence.old.size()));
    for (int64_t length = std::min(max_match, known); length >= settings.min_match; --length) {
        for (int side = 0; side < 2; ++side) {
            const auto& windows = side ? sequence.old : sequence.young;
            const Generation& generation = side ? *trie.old : *trie.young;
            if (length > static_cast<int64_t>(windows.size())) continue;
            const int32_t node = windows[length - 1];
            if (!generation.nodes[node].first) continue;
            tree.window = static_cast<int32_t>(length);
            if (settings.by_probability) {
                grow_by_probability(tree, generation, node, settings.max_breadth);
            } else {
                const int64_t more = (settings.max_breadth - settings.min_breadth) * (max_match - length);
                const int64_t breadth = settings.min_breadth + more / (max_match - settings.min_match + 1);
                breadth_first(tree, generation, node, breadth, settings.min_breadth);
            }
            if (tree.full()) return;
        }
    }
}

}  // namespace

// An ended sequence is null: it has no windows, and updates to it are ignored.
extern "C" {

void* troupe_trie_open(int64_t half, int64_t depth) try { return new Trie(half, depth); } catch (...) {
    return nullptr;
}

void troupe_trie_close(Trie* trie) { delete trie; }

int64_t troupe_trie_size(const Trie* trie) { return trie->young->size() + trie->old->size(); }

void* troupe_trie_begin(Trie* trie, int64_t salt) try {
    auto fresh = std::make_unique<Sequence>(Sequence{salt, trie->young->number, {}, {}});
    trie->sequences.insert(fresh.get());
    return fresh.release();
} catch (...) {
    return nullptr;
}

void troupe_trie_end(Trie* trie, Sequence* sequence) {
    trie->sequences.erase(sequence);
    delete sequence;
}

void troupe_trie_forget(Trie* trie, int64_t salt) {
    trie->young->roots.erase(salt);
    trie->old->roots.erase(salt);
}

void troupe_trie_interrupt(Sequence* sequence) {
    if (!sequence) return;
    sequence->young.clear();
    sequence->old.clear();
}

int64_t troupe_trie_known(const Sequence* sequence) {
    return sequence ? static_cast<int64_t>(sequence->young.size()) : 0;
}

// Returns false if out of memory.
int troupe_trie_extend(Trie* trie, Sequence* sequence, const int32_t* tokens, int64_t count) try {
    if (sequence) trie->extend(*sequence, tokens, count);
    return 1;
} catch (...) {
    return 0;
}

// Returns the number of nodes of the tree; 0 if out of memory. ``tokens``, ``parents`` and ``windows`` [max_nodes].
int64_t troupe_trie_draft(Trie* trie, Sequence* sequence, int32_t last, int64_t max_nodes, const Settings* settings,
                          int32_t* tokens, int32_t* parents, int32_t* windows) try {
    tokens[0] = last, parents[0] = -1, windows[0] = 0;
    Tree tree{tokens, parents, windows, max_nodes};
    if (sequence) draft_tree(*trie, *sequence, *settings, tree);
    return tree.count;
} catch (...) {
    return 0;
}
}
