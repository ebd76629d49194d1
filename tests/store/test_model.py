"""Nobody can tell a store from a dict that remembers what was committed."""

from tests.store.model import StoreAgainstDict, machine_settings

StoreAgainstDict.TestCase.settings = machine_settings(50, 50, derandomize=True)
TestStoreAgainstDict = StoreAgainstDict.TestCase
