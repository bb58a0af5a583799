"""The small engine's pool of blocks, as connectors see vLLM's."""

from collections import OrderedDict

BLOCK = 16
HOLE = 0


class Block:
    def __init__(self, number):
        self.block_id = number


class Shown:
    """What vLLM's pool shows a connector."""

    def show(self, blocks):
        self.blocks = [Block(b) for b in range(blocks)]
        #: References that the connector has.
        self.held = self.most_held = 0

    def touch(self, blocks):
        for block in blocks:
            assert self.references[block.block_id] > 0, "it was free already"
            self.references[block.block_id] += 1
        self.held += len(blocks)
        self.most_held = max(self.most_held, len(blocks))

    def free_blocks(self, blocks):
        for block in blocks:
            self._unused(block.block_id)
            self.held -= 1

    def reset_prefix_cache(self):
        if len(self.free) != len(self.references) - 1:
            return False
        self.of_hash.clear()
        self.hash_of.clear()
        return True


class Pool(Shown):
    """Blocks by reference counts; free ones keep what they hold until they are taken, the longest free first. A request has HOLE
    in place of a block that it needs no page for."""

    def __init__(self, blocks):
        self.references = [0] * blocks
        self.free = OrderedDict((b, None) for b in range(1, blocks))  # HOLE is nobody's
        self.of_hash, self.hash_of = {}, {}
        self.requests = {}
        self.show(blocks)

    def hits(self, request):
        blocks = []
        for key in request.block_hashes[: (request.num_tokens - 1) // BLOCK]:
            if key not in self.of_hash:
                break
            blocks.append(self.of_hash[key])
        return blocks

    def allocate(self, request, tokens, hits=(), holes=0):
        """Room for the first `tokens` tokens; the new blocks, or None. holes: of so many blocks after the hits."""
        own, hits = self.requests.get(request.request_id, []), list(hits) + [HOLE] * holes
        wanted = -(-tokens // BLOCK) - len(own) - len(hits)
        if wanted > len(self.free) - sum(1 for b in hits if b in self.free):
            return None
        for b in filter(None, hits):
            self.references[b] += 1
            self.free.pop(b, None)
        new = []
        for _ in range(wanted):
            b, _ = self.free.popitem(last=False)
            self.of_hash.pop(self.hash_of.pop(b, None), None)
            self.references[b] = 1
            new.append(b)
        self.requests[request.request_id] = own + hits + new
        return new

    def cache(self, request, tokens):
        blocks = self.requests[request.request_id]
        for i in range(min(tokens // BLOCK, len(request.block_hashes))):
            key = request.block_hashes[i]
            if blocks[i] != HOLE and key not in self.of_hash and blocks[i] not in self.hash_of:
                self.of_hash[key], self.hash_of[blocks[i]] = blocks[i], key

    def release(self, request):
        for b in reversed(self.requests.pop(request.request_id, [])):
            self._unused(b)

    def forget(self, blocks):
        """The blocks no longer hold what they were cached for."""
        for b in blocks:
            self.of_hash.pop(self.hash_of.pop(b, None), None)

    def give_back(self, request, blocks):
        """The request needs no pages for its first `blocks` blocks any more."""
        own = self.requests[request.request_id]
        for i in range(blocks):
            own[i], b = HOLE, own[i]
            self._unused(b)

    def _unused(self, b):
        if b == HOLE:
            return
        self.references[b] -= 1
        if self.references[b] == 0:
            self.free[b] = None

    def idle(self):
        return len(self.free) == len(self.references) - 1 and not self.requests
