{{/* The one container of a pod, as a list item. */}}
{{- define "pd-coordinator.container" -}}
- name: coordinator
  image: {{ include "pd-coordinator.image" . | quote }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [serve, --config, /etc/pd-coordinator/cluster.yaml]
  {{- if or .Values.secretEnv .Values.extraEnv }}
  env:
    {{- range .Values.secretEnv }}
    - name: {{ .name }}
      valueFrom:
        secretKeyRef:
          name: {{ .secretName | quote }}
          key: {{ .key | quote }}
    {{- end }}
    {{- with .Values.extraEnv }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  ports:
    {{- range include "pd-coordinator.ports" . | fromYamlArray }}
    - name: {{ .name }}
      containerPort: {{ .containerPort | int64 }}
      protocol: TCP
    {{- end }}
    {{- range .Values.enginePorts }}
    - name: {{ .name }}
      containerPort: {{ .port | int64 }}
      protocol: TCP
    {{- end }}
  {{- $scheme := .Values.probes.scheme | default (include "pd-coordinator.scheme" (list .Values "management")) | upper }}
  {{- $probes := .Values.probes }}
  {{- $paths := dict "startup" "/v1/startup" "liveness" "/v1/health" "readiness" "/v1/readiness" }}
  {{- range $kind := list "startup" "liveness" "readiness" }}
  {{ $kind }}Probe:
    httpGet:
      path: {{ get $paths $kind }}
      port: {{ $probes.port }}
      scheme: {{ $scheme }}
    {{- range $key, $value := get $probes $kind }}
    {{ $key }}: {{ $value | int64 }}
    {{- end }}
  {{- end }}
  {{- if gt (.Values.preStopSleepSeconds | int64) 0 }}
  lifecycle:
    preStop:
      exec:
        command: [sleep, {{ .Values.preStopSleepSeconds | int64 | toString | quote }}]
  {{- end }}
  {{- with .Values.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    privileged: false
    allowPrivilegeEscalation: false
    readOnlyRootFilesystem: true
    runAsNonRoot: true
    capabilities:
      drop: [ALL]
    seccompProfile:
      type: RuntimeDefault
  volumeMounts:
    - name: config
      mountPath: /etc/pd-coordinator
      readOnly: true
    - name: tmp
      mountPath: /tmp
    {{- range .Values.secretFiles }}
    - name: secret-{{ .name }}
      mountPath: /run/secrets/pd-coordinator/{{ .name }}
      readOnly: true
    {{- end }}
    {{- with .Values.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The volumes of a pod. */}}
{{- define "pd-coordinator.volumes" -}}
- name: config
  configMap:
    name: {{ include "pd-coordinator.fullname" . }}
- name: tmp
  emptyDir:
    sizeLimit: 64Mi
{{- range .Values.secretFiles }}
- name: secret-{{ .name }}
  secret:
    secretName: {{ .secretName }}
    # for the owner and fsGroup alone
    defaultMode: 0440
    {{- if .optional }}
    optional: true
    {{- end }}
    {{- with .items }}
    items:
      {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
