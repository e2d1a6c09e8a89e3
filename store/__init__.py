"""The store of hidden states; a notebook needs `open_store` alone. Loads no torch."""

from dflash_pipeline.store.reader import Sample, Store, open_store
from dflash_pipeline.store.spec import Layout, ShardId, StoreSpec

__all__ = ["Layout", "Sample", "ShardId", "Store", "StoreSpec", "open_store"]
