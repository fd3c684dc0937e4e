"""The fields of Kubernetes and KubeRay that the manifests use, and no others: a typo is an error.

After the Go types of KubeRay v1.7 (ray-operator/apis/ray/v1) and Kubernetes' batch/v1 and core/v1.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

# DNS-1035; KubeRay appends to the names of its children.
Name = Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=47)]
Quantity = Annotated[str, Field(pattern=r"^\d+(m|Mi|Gi)?$")]
RANGES = [(0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]


def is_cron(schedule: str) -> bool:
    """Five fields of numbers, ranges, lists and steps within their bounds."""
    fields = schedule.split()
    if len(fields) != len(RANGES):
        return False
    for field, (low, high) in zip(fields, RANGES, strict=True):
        for item in field.split(","):
            match = re.fullmatch(r"(?:\*|(\d+)(?:-(\d+))?)(?:/([1-9]\d*))?", item)
            bounds = [int(g) for g in match.groups()[:2] if g] if match else [-1]
            if any(not low <= n <= high for n in bounds) or bounds != sorted(bounds):
                return False
    return True


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Metadata(Strict):
    name: Name


class ConfigMap(Strict):
    apiVersion: Literal["v1"]
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[str, str]


class Resources(Strict):
    requests: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]
    limits: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]

    @model_validator(mode="after")
    def _same_memory(self) -> "Resources":
        assert self.requests["memory"] == self.limits["memory"], "Ray reads the limit"
        return self


class Env(Strict):
    """No `value`: a secret in clear would look like any other."""

    name: str
    valueFrom: dict[Literal["fieldRef", "secretKeyRef"], dict[str, str]]


class Mount(Strict):
    name: Name
    mountPath: Annotated[str, Field(pattern="^/")]
    readOnly: bool = False


class Container(Strict):
    name: Name
    image: Annotated[str, Field(pattern=r"^[\w.-]+/[\w-]+:[\w.-]+$")]
    command: list[str] = []
    env: list[Env] = []
    envFrom: list[dict[Literal["secretRef"], Metadata]] = []
    resources: Resources
    volumeMounts: list[Mount] = []


class Volume(Strict):
    name: Name
    configMap: Metadata | None = None
    persistentVolumeClaim: dict[Literal["claimName", "readOnly"], Any] | None = None
    emptyDir: dict[Literal["medium", "sizeLimit"], str] | None = None
    secret: dict[Literal["secretName"], Name] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> "Volume":
        given = [self.configMap, self.persistentVolumeClaim, self.emptyDir, self.secret]
        assert sum(source is not None for source in given) == 1
        return self


class Security(Strict):
    runAsNonRoot: Literal[True]
    runAsUser: Annotated[int, Field(ge=1)]


class PodSpec(Strict):
    restartPolicy: Literal["Never", "OnFailure"] | None = None
    terminationGracePeriodSeconds: int = 30
    securityContext: Security
    containers: list[Container]
    volumes: list[Volume] = []

    @model_validator(mode="after")
    def _mounts_have_volumes(self) -> "PodSpec":
        names = {volume.name for volume in self.volumes}
        assert {m.name for c in self.containers for m in c.volumeMounts} == names
        return self


class Pod(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: Pod


class WorkerGroup(HeadGroup):
    groupName: Name
    replicas: int
    minReplicas: int
    maxReplicas: int

    @model_validator(mode="after")
    def _ordered(self) -> "WorkerGroup":
        assert self.minReplicas <= self.replicas <= self.maxReplicas
        return self


class ClusterSpec(Strict):
    rayVersion: str
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class RayCluster(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


class RayJobSpec(Strict):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode"]
    backoffLimit: Annotated[int, Field(ge=0)]
    activeDeadlineSeconds: Annotated[int, Field(gt=0)]
    shutdownAfterJobFinishes: bool = False
    ttlSecondsAfterFinished: int = 0
    deletionStrategy: Any = None
    clusterSelector: dict[str, str] | None = None
    rayClusterSpec: ClusterSpec | None = None

    @model_validator(mode="after")
    def _exclusive(self) -> "RayJobSpec":
        assert (self.clusterSelector is None) != (self.rayClusterSpec is None)
        assert not (self.clusterSelector and self.backoffLimit)
        assert not (self.deletionStrategy and self.shutdownAfterJobFinishes)
        assert self.shutdownAfterJobFinishes or not self.ttlSecondsAfterFinished
        return self


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


class RayServiceSpec(Strict):
    serveConfigV2: str
    upgradeStrategy: dict[
        Literal["type"], Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]
    ]
    rayClusterDeletionDelaySeconds: Annotated[int, Field(ge=0)]
    rayClusterConfig: ClusterSpec


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec


class JobSpec(Strict):
    backoffLimit: Annotated[int, Field(ge=0)]
    activeDeadlineSeconds: Annotated[int, Field(gt=0)]
    template: Pod


class JobTemplate(Strict):
    spec: JobSpec


class CronJobSpec(Strict):
    schedule: str
    timeZone: str
    concurrencyPolicy: Literal["Forbid"]
    startingDeadlineSeconds: Annotated[int, Field(ge=10)]
    successfulJobsHistoryLimit: int
    failedJobsHistoryLimit: int
    jobTemplate: JobTemplate

    @model_validator(mode="after")
    def _valid(self) -> "CronJobSpec":
        assert is_cron(self.schedule), self.schedule
        assert self.jobTemplate.spec.template.spec.restartPolicy, "jobs need one"
        return self


class CronJob(Strict):
    apiVersion: Literal["batch/v1"]
    kind: Literal["CronJob"]
    metadata: Metadata
    spec: CronJobSpec


KINDS: dict[str, type[Strict]] = {
    kind.__name__: kind for kind in (ConfigMap, RayCluster, RayJob, RayService, CronJob)
}
